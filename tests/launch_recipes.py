#!/usr/bin/env python3
"""Checks the files of examples/launch for Kubernetes: launch_recipes.py FOLDER. By the fields that the objects have (batch/v1, v1 and
kubeflow.org/v2beta1; of those that may stand in them the ones that a recipe could want), by what must agree within them, and by the schemas of
Kubernetes where the package kubernetes-validate is there (pip install kubernetes-validate). With --notices: that this finds errors. Exit code
77 where there is no PyYAML."""
import pathlib
import sys
import tempfile

try:
    import yaml
except ImportError:
    print("python3 has no PyYAML")
    sys.exit(77)
try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

# A dict has these fields, those with "!" it must have; a list has elements of one kind; a tuple lists the values; TEXTS has any names.
TEXTS = object()
METADATA = {"name": str, "namespace": str, "labels": TEXTS, "annotations": TEXTS}
FROM = {"name!": str, "key!": str, "optional": bool}
VARIABLE = {"name!": str, "value": str, "valueFrom": {"secretKeyRef": FROM, "configMapKeyRef": FROM, "fieldRef": {"fieldPath!": str}}}
CONTAINER = {"name!": str, "image!": str, "command": [str], "args": [str], "workingDir": str, "env": [VARIABLE],
             "imagePullPolicy": ("Always", "Never", "IfNotPresent"), "resources": {"requests": TEXTS, "limits": TEXTS},
             "volumeMounts": [{"name!": str, "mountPath!": str, "subPath": str, "readOnly": bool}]}
ONCE = ("Never", "OnFailure")  # of a Job's pods and an MPIJob's replicas
POD = {"containers!": [CONTAINER], "restartPolicy": ONCE, "subdomain": str, "hostname": str, "nodeSelector": TEXTS, "hostNetwork": bool,
       "hostIPC": bool, "serviceAccountName": str}
TEMPLATE = {"metadata": METADATA, "spec!": POD}
SERVICE = {"apiVersion!": ("v1",), "kind!": ("Service",), "metadata!": METADATA,
           "spec!": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": TEXTS, "type": ("ClusterIP",)}}
JOB = {"apiVersion!": ("batch/v1",), "kind!": ("Job",), "metadata!": METADATA,
       "spec!": {"completionMode": ("Indexed", "NonIndexed"), "completions": int, "parallelism": int, "backoffLimit": int,
                 "activeDeadlineSeconds": int, "ttlSecondsAfterFinished": int, "suspend": bool, "template!": TEMPLATE}}
REPLICA = {"replicas": int, "restartPolicy": ONCE, "template!": TEMPLATE}
MPI_JOB = {"apiVersion!": ("kubeflow.org/v2beta1",), "kind!": ("MPIJob",), "metadata!": METADATA,
           "spec!": {"slotsPerWorker": int, "runLauncherAsWorker": bool, "sshAuthMountPath": str,
                     "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"), "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
                     "runPolicy": {"cleanPodPolicy": ("Running", "None", "All"), "ttlSecondsAfterFinished": int, "activeDeadlineSeconds": int,
                                   "backoffLimit": int, "suspend": bool, "managedBy": str},
                     "mpiReplicaSpecs!": {"Launcher!": REPLICA, "Worker": REPLICA}}}

# Each of these changes must be found.
ERRORS = [("indexed-job.yaml", "completionMode: Indexed", "completionMode: indexed"), ("indexed-job.yaml", 'value: "4"', "value: 4"),
          ("indexed-job.yaml", "completions: 4", "completions: 3"), ("indexed-job.yaml", "restartPolicy:", "restartpolicy:"),
          ("indexed-job.yaml", "subdomain: train", "subdomain: other"), ("indexed-job.yaml", "image:", "images:"),
          ("indexed-job.yaml", "publishNotReadyAddresses: true", "publishNotReadyAddresses: false"),
          ("mpijob.yaml", "slotsPerWorker: 2", "slotsPerWorker: 3"), ("mpijob.yaml", "cleanPodPolicy: Running", "cleanPodPolicy: running"),
          ("mpijob.yaml", "Launcher:", "launcher:"), ("mpijob.yaml", "backoffLimit", "backOffLimit"),
          ("mpijob.yaml", "apiVersion: kubeflow.org/v2beta1", "apiVersion: kubeflow.org/v1"), ("mpijob.yaml", 'cpu: "4"', "cpu: [4]")]


def conforms(value, schema, where):
    """Returns what is wrong."""
    if schema is TEXTS:
        return conforms(value, dict, where) or [f"{where}.{name}: no text" for name, text in value.items() if not isinstance(text, str)]
    if isinstance(schema, tuple):
        return [] if value in schema else [f"{where}: '{value}' is none of {', '.join(schema)}"]
    if isinstance(schema, list):
        return conforms(value, list, where) or [one for i, element in enumerate(value) for one in conforms(element, schema[0], f"{where}[{i}]")]
    if not isinstance(schema, dict):
        right = isinstance(value, schema) and (schema is bool or not isinstance(value, bool))
        return [] if right else [f"{where}: no {schema.__name__}"]
    found = conforms(value, dict, where)
    if found:
        return found
    known = {name.rstrip("!"): kind for name, kind in schema.items()}
    found = [f"{where}: no such field: {name}" for name in value if name not in known]
    found += [f"{where}: {name[:-1]} is missing" for name in schema if name.endswith("!") and name[:-1] not in value]
    return found + [one for name, part in value.items() if name in known for one in conforms(part, known[name], f"{where}.{name}")]


def by_schema(document, name):
    if kubernetes_validate is None:
        return []
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except Exception as error:  # of the package, or of jsonschema
        return [f"{name}: {error}"]
    return []


def check_indexed_job(folder):
    service, job = yaml.safe_load_all((folder / "indexed-job.yaml").read_text())
    found = conforms(service, SERVICE, "Service") + conforms(job, JOB, "Job") + by_schema(service, "Service") + by_schema(job, "Job")
    if found:
        return found
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    given = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    rules = {"no indexed Job": spec["completionMode"] == "Indexed", "all ranks must run at once": spec["completions"] == spec["parallelism"],
             "WORLD_SIZE is not completions": given["WORLD_SIZE"] == str(spec["completions"]),
             "MASTER_ADDR is not pod 0": given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}",
             "subdomain is not the Service": pod["subdomain"] == service["metadata"]["name"],
             "no headless Service": service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"],
             "the Service selects other pods": service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}}
    return [text for text, holds in rules.items() if not holds]


def check_mpi_job(folder):
    job = yaml.safe_load((folder / "mpijob.yaml").read_text())
    found = conforms(job, MPI_JOB, "MPIJob")
    if found:
        return found
    spec = job["spec"]
    for name, replica in spec["mpiReplicaSpecs"].items():
        found += by_schema({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **replica["template"]}, f"MPIJob, {name}")
    command = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    ranks = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    return found + ([] if command[command.index("-np") + 1] == str(ranks) else ["-np is not the workers' slots"])


def check_all(folder):
    return check_indexed_job(folder) + check_mpi_job(folder)


def unnoticed(folder):
    found = []
    for name, right, wrong in ERRORS:
        with tempfile.TemporaryDirectory() as other:
            for file in folder.glob("*.yaml"):
                text = file.read_text()
                changed = text.replace(right, wrong, 1) if file.name == name else text
                if file.name == name and changed == text:
                    found.append(f"{name} has no '{right}'")
                (pathlib.Path(other) / file.name).write_text(changed)
            if not check_all(pathlib.Path(other)):
                found.append(f"{name}: '{wrong}' is not noticed")
    return found


recipes = pathlib.Path(sys.argv[1])
problems = unnoticed(recipes) if "--notices" in sys.argv else check_all(recipes)
print("with the schemas of Kubernetes" if kubernetes_validate else "without the schemas of Kubernetes: no kubernetes-validate")
print("\n".join(problems))
sys.exit(1 if problems else 0)
