#!/usr/bin/env python3
"""Checks the files of examples/launch for Kubernetes: launch_recipes.py FOLDER. The Job and the Service by the schemas of Kubernetes, where
the package kubernetes-validate is there (pip install kubernetes-validate), and in any case by what must agree within them; the MPIJob by the
fields of kubeflow.org/v2beta1. Exit code 77 where there is no PyYAML."""
import pathlib
import sys

try:
    import yaml
except ImportError:
    print("python3 has no PyYAML")
    sys.exit(77)
try:
    import kubernetes_validate
except ImportError:
    kubernetes_validate = None

problems = []


def check(right, what):
    if not right:
        problems.append(what)


def by_schema(document, name):
    if kubernetes_validate is None:
        return
    try:
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)
    except Exception as error:  # of the package, or of jsonschema
        problems.append(f"{name}: {error}")


def fields(value, allowed, needed, where):
    check(set(value) <= set(allowed), f"{where}: no such field: {', '.join(sorted(set(value) - set(allowed)))}")
    check(set(needed) <= set(value), f"{where}: missing: {', '.join(sorted(set(needed) - set(value)))}")


def check_indexed_job(folder):
    service, job = yaml.safe_load_all((folder / "indexed-job.yaml").read_text())
    by_schema(service, "indexed-job.yaml, Service")
    by_schema(job, "indexed-job.yaml, Job")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    check(job["apiVersion"] == "batch/v1" and job["kind"] == "Job" and spec["completionMode"] == "Indexed", "no indexed Job")
    check(spec["completions"] == spec["parallelism"], "all ranks must run at once")
    check(pod["restartPolicy"] in ("Never", "OnFailure"), "restartPolicy of a Job")
    given = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
    check(all(value is None or isinstance(value, str) for value in given.values()), "variables are strings")
    check(given["WORLD_SIZE"] == str(spec["completions"]), "WORLD_SIZE is not completions")
    check(given["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}", "MASTER_ADDR is not pod 0")
    check(pod["subdomain"] == service["metadata"]["name"], "subdomain is not the Service")
    check(service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"], "no headless Service")
    check(service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}, "the Service selects other pods")


def check_mpi_job(folder):
    job = yaml.safe_load((folder / "mpijob.yaml").read_text())
    check(job["apiVersion"] == "kubeflow.org/v2beta1" and job["kind"] == "MPIJob", "no MPIJob")
    spec = job["spec"]
    fields(spec, ["slotsPerWorker", "runLauncherAsWorker", "runPolicy", "mpiReplicaSpecs", "sshAuthMountPath", "launcherCreationPolicy",
                  "mpiImplementation"], ["mpiReplicaSpecs"], "MPIJob.spec")
    fields(spec["runPolicy"], ["cleanPodPolicy", "ttlSecondsAfterFinished", "activeDeadlineSeconds", "backoffLimit", "schedulingPolicy",
                               "suspend", "managedBy"], [], "runPolicy")
    check(spec["runPolicy"]["cleanPodPolicy"] in ("Running", "None", "All"), "cleanPodPolicy")
    check(spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH"), "mpiImplementation")
    fields(spec["mpiReplicaSpecs"], ["Launcher", "Worker"], ["Launcher"], "mpiReplicaSpecs")
    for name, replica in spec["mpiReplicaSpecs"].items():
        fields(replica, ["replicas", "template", "restartPolicy"], ["template"], name)
        check(replica["restartPolicy"] in ("Never", "OnFailure"), f"{name}: restartPolicy")
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, **replica["template"]}
        by_schema(pod, f"mpijob.yaml, {name}")
    command = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["command"]
    ranks = spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    check(command[command.index("-np") + 1] == str(ranks), "-np is not the workers' slots")


check_indexed_job(pathlib.Path(sys.argv[1]))
check_mpi_job(pathlib.Path(sys.argv[1]))
print("with the schemas of Kubernetes" if kubernetes_validate else "without the schemas of Kubernetes: no kubernetes-validate")
print("\n".join(problems))
sys.exit(1 if problems else 0)
