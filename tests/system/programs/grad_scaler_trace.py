# "write SEED": a random sequence of calls of GradScaler, right ones and wrong ones, with finite and other gradients.
# "replay": what PyTorch's own GradScaler makes of the sequence on standard input; grad_scaler_trace.cc does the same with hvd's.
import math
import random
import sys


def write(seed):
    rng = random.Random(seed)

    def gradient():
        return rng.choice([rng.uniform(-2, 2)] * 12 + [3e35, 1e-40, 0.0, math.inf, -math.inf, math.nan])

    for interval, start in [(1, 65536.0), (2, 2.0**126), (3, 1.0), (5, 65536.0), (4, 3.7), (2000, 65536.0)]:
        print("start", start, rng.choice([2.0, 1.5, 3.0]), rng.choice([0.5, 0.3, 0.25]), interval)
        for _ in range(60):
            used = rng.choice([[0], [1], [0, 1]])
            for which in used:
                if rng.random() < 0.9:
                    print("zero", which)
                for _ in range(rng.choice([1, 1, 1, 2])):
                    print("backward", which, repr(gradient()), repr(gradient()))
            for which in used:
                if rng.random() < 0.4:
                    print("unscale", which)
                if rng.random() < 0.95:
                    print("step", which)
            if rng.random() < 0.1:
                print(rng.choice(["unscale", "step"]), rng.choice([0, 1]))
            if rng.random() < 0.04:
                print("set", rng.choice([1.0, 1024.0, 5.5]))
            if rng.random() < 0.97:
                print("update")
            # PyTorch has no word on a scaler that is replaced between unscale_ and update; nobody does that.
            if rng.random() < 0.05:
                print("reload")


def show(value):
    if math.isnan(value):
        return "nan"
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    return value


def replay():
    import torch

    def same_float(value):
        return show(value) if isinstance(show(value), str) else value.hex()

    for line in sys.stdin:
        words = line.split()
        if words[0] == "start":
            options = dict(init_scale=float(words[1]), growth_factor=float(words[2]), backoff_factor=float(words[3]), growth_interval=int(words[4]))
            scaler = torch.amp.GradScaler("cpu", **options)
            parameters = [torch.ones(2, requires_grad=True) for _ in range(2)]
            optimizers = [torch.optim.SGD([p], lr=0.125) for p in parameters]
            continue
        refused = False
        try:
            which = int(float(words[1])) if len(words) > 1 else 0
            if words[0] == "backward":
                gradient = torch.tensor([float(words[2]), float(words[3])], dtype=torch.float32)
                scaler.scale((parameters[which] * gradient).sum()).backward()
            elif words[0] == "zero":
                optimizers[which].zero_grad()
            elif words[0] == "unscale":
                scaler.unscale_(optimizers[which])
            elif words[0] == "step":
                scaler.step(optimizers[which])
            elif words[0] == "update":
                scaler.update()
            elif words[0] == "set":
                scaler.update(float(words[1]))
            elif words[0] == "reload":
                state = scaler.state_dict()
                scaler = torch.amp.GradScaler("cpu", **options)
                scaler.load_state_dict(state)
        except (RuntimeError, AssertionError):
            refused = True
        left = [same_float(scaler.get_scale()), str(scaler.state_dict()["_growth_tracker"])]
        for p in parameters:
            left += [same_float(v) for v in p.detach().tolist()]
            left += ["none"] if p.grad is None else [same_float(v) for v in p.grad.tolist()]
        print(line.strip(), ": refused" if refused else ": done", *left)


write(int(sys.argv[2])) if sys.argv[1] == "write" else replay()
