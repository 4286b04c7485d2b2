"""scripts/gke.sh against a stand-in for kubectl, and the table of TPU slices."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.launcher_stubs import ROOT, World, printed_commands

TRAINING = ("--config=a b.py:B/16,x", "--workdir=/mnt/work/it's", '--config.x=("1", $HOME, $(A))')
GKE = ("--name=vit", "--image=registry.example/vit:1", "--bucket=gs://b")
TPU = (*GKE, "--accelerator=v5e-16")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path, workers=0)


# Topology, machines, chips per machine: Google's tables, "TPU v4", "v5e", "v5p", "v6e".
@pytest.mark.parametrize(
    ("accelerator", "topology", "hosts", "chips_per_host", "cloud_type", "gke_type"),
    [
        ("v2-8", "2x2", 1, 4, "v2-8", ""),
        ("v3-8", "2x2", 1, 4, "v3-8", "tpu-v3-device"),
        ("v3-32", "4x4", 4, 4, "v3-32", "tpu-v3-slice"),
        ("v3-2048", "32x32", 256, 4, "v3-2048", "tpu-v3-slice"),
        ("v4-8", "2x2x1", 1, 4, "v4-8", "tpu-v4-podslice"),
        ("v4-16", "2x2x2", 2, 4, "v4-16", "tpu-v4-podslice"),
        ("v4-512", "4x8x8", 64, 4, "v4-512", "tpu-v4-podslice"),
        ("v5e-1", "1x1", 1, 1, "v5litepod-1", "tpu-v5-lite-podslice"),
        ("v5e-4", "2x2", 1, 4, "v5litepod-4", "tpu-v5-lite-podslice"),
        ("v5litepod-8", "2x4", 1, 8, "v5litepod-8", "tpu-v5-lite-podslice"),
        ("v5e-16", "4x4", 4, 4, "v5litepod-16", "tpu-v5-lite-podslice"),
        ("v5e-256", "16x16", 64, 4, "v5litepod-256", "tpu-v5-lite-podslice"),
        ("v5p-8", "2x2x1", 1, 4, "v5p-8", "tpu-v5p-slice"),
        ("v5p-16", "2x2x2", 2, 4, "v5p-16", "tpu-v5p-slice"),
        ("v5p-12288", "16x16x24", 1536, 4, "v5p-12288", "tpu-v5p-slice"),
        ("v6e-8", "2x4", 1, 8, "v6e-8", "tpu-v6e-slice"),
        ("v6e-256", "16x16", 64, 4, "v6e-256", "tpu-v6e-slice"),
    ],
)
def test_what_a_slice_is_made_of(
    accelerator: str,
    topology: str,
    hosts: int,
    chips_per_host: int,
    cloud_type: str,
    gke_type: str,
) -> None:
    script = (
        "program=test; source scripts/launchers/shell.sh; source scripts/launchers/tpu_types.sh; "
        'tpu_type "$1"; echo "$topology $hosts $chips_per_host $cloud_type $gke_type"'
    )
    command = ["bash", "-euo", "pipefail", "-c", script, "bash", accelerator]
    words = subprocess.check_output(command, cwd=ROOT, text=True).split()
    expected = f"{topology} {hosts} {chips_per_host} {cloud_type} {gke_type}"
    assert words == expected.split()


def manifest(world: World, *flags: str, training: tuple[str, ...] = TRAINING) -> dict[str, Any]:
    status, text, said = world.run("gke.sh", "render", *flags, "--", *training)
    assert status == 0, said
    assert set(re.findall(r"@[A-Z_]+@", text)) <= set(re.findall(r"@[A-Z_]+@", str(training)))
    return yaml.safe_load(text)


@pytest.mark.parametrize(
    ("accelerator", "slices", "hosts", "chips"),
    [("v5e-16", 1, 4, 4), ("v5e-256", 2, 64, 4), ("v4-8", 1, 1, 4), ("v5p-16", 3, 2, 4)],
)
def test_the_jobset_has_a_pod_per_machine(
    world: World, accelerator: str, slices: int, hosts: int, chips: int
) -> None:
    flags = (*GKE, f"--accelerator={accelerator}", f"--slices={slices}", "--spot")
    jobset = manifest(world, *flags)
    [workers] = jobset["spec"]["replicatedJobs"]
    job = workers["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert workers["replicas"] == slices
    assert job["parallelism"] == job["completions"] == hosts
    assert container["resources"]["limits"] == {"google.com/tpu": str(chips)}
    assert pod["nodeSelector"]["cloud.google.com/gke-spot"] == "true"
    for value in pod["nodeSelector"].values():
        assert isinstance(value, str)
    assert "exclusive-topology" in next(iter(jobset["metadata"]["annotations"]))
    assert pod["terminationGracePeriodSeconds"] == 300


def test_the_jobset_restarts_on_75_and_never_on_1_or_2(world: World) -> None:
    spec = manifest(world, *TPU, "--max_restarts=7")["spec"]
    assert spec["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [{"action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
    }
    job = spec["replicatedJobs"][0]["template"]["spec"]
    # Count with no retries of its own: the Job fails for another reason, and the JobSet restarts.
    assert job["backoffLimit"] == 0
    assert job["template"]["spec"]["restartPolicy"] == "Never"
    codes = {
        rule["action"]: rule["onExitCodes"]["values"] for rule in job["podFailurePolicy"]["rules"]
    }
    assert codes == {"Count": [75], "FailJob": [1, 2, 130]}
    [container] = job["template"]["spec"]["containers"]
    for rule in job["podFailurePolicy"]["rules"]:
        assert rule["onExitCodes"]["containerName"] == container["name"]


def test_arguments_reach_the_pod_unchanged(world: World) -> None:
    training = (*TRAINING, r'--config.y=a "b" \n & @NAME@ $$ {c: d} #', "--config.z=")
    pairs = ("--env=TFDS_DATA_DIR=/mnt/work/data sets", '--env=E=a"b$(C)=1')
    jobset = manifest(world, *TPU, *pairs, "--script=scripts/finetune.py", training=training)
    [container] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"][
        "containers"
    ]
    assert container["command"] == ["python"]
    # Kubernetes makes one $ of two, and replaces $(NAME).
    assert not [word for word in container["args"] if re.search(r"(?<!\$)(\$\$)*\$\(", word)]
    arguments = [word.replace("$$", "$") for word in container["args"]]
    assert arguments == ["scripts/finetune.py", "--distributed=auto", *training]
    environment = {pair["name"]: pair["value"].replace("$$", "$") for pair in container["env"]}
    assert environment == {"TFDS_DATA_DIR": "/mnt/work/data sets", "E": 'a"b$(C)=1'}


def test_gpu_pods_are_told_who_they_are(world: World) -> None:
    flags = ("--gpus_per_node=8", "--nodes=2", "--gpu_type=nvidia-h100-80gb")
    jobset = manifest(world, "--name=vit", "--image=i", "--volume_claim=v", *flags)
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    pod = job["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 2
    assert pod["containers"][0]["resources"]["limits"] == {"nvidia.com/gpu": "8"}
    assert pod["containers"][0]["args"][1:4] == [
        "--coordinator_address=vit-workers-0-0.vit:8476",
        "--num_processes=2",
        "--process_id=$(JOB_COMPLETION_INDEX)",
    ]
    assert pod["nodeSelector"] == {"cloud.google.com/gke-accelerator": "nvidia-h100-80gb"}
    assert pod["volumes"][0] == {"name": "work", "persistentVolumeClaim": {"claimName": "v"}}
    assert not jobset["metadata"]["annotations"]


def test_a_work_directory_in_a_bucket_needs_no_volume(world: World) -> None:
    training = (TRAINING[0], "--workdir=gs://bucket/run")
    flags = ("--name=vit", "--image=i", "--accelerator=v5e-16")
    jobset = manifest(world, *flags, training=training)
    pod = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0] == {"name": "work", "emptyDir": {}}
    assert "--workdir=gs://bucket/run" in pod["containers"][0]["args"]


def test_apply_hands_the_manifest_to_kubectl(world: World) -> None:
    flags = (*TPU, "--context=c", "--namespace=n")
    _, text, _ = world.run("gke.sh", "render", *flags, "--", *TRAINING)
    _, printed, _ = world.run("gke.sh", "apply", "--dry_run", *flags, "--", *TRAINING)
    assert world.calls() == []
    assert (
        printed == f"kubectl --context=c apply --filename=- <<'EOF_MANIFEST'\n{text}EOF_MANIFEST\n"
    )
    assert world.run("gke.sh", "apply", *flags, "--", *TRAINING)[0] == 0
    assert world.calls() == [["kubectl", "--context=c", "apply", "--filename=-"]]
    assert world.stdin == [text]
    assert yaml.safe_load(text)["metadata"]["namespace"] == "n"


def test_gke_commands_run_what_their_dry_run_printed(world: World) -> None:
    label = "--selector=jobset.sigs.k8s.io/jobset-name=vit"
    first = ",jobset.sigs.k8s.io/job-index=0,batch.kubernetes.io/job-completion-index=0"
    logs = ["logs", "--namespace=default"]
    patch = ["patch", "jobset", "vit", "--namespace=default", "--type=merge"]
    expected: dict[tuple[str, ...], list[list[str]]] = {
        ("logs",): [[*logs, label + first, "--container=train", "--follow", "--tail=100"]],
        ("logs", "--worker=all"): [
            [*logs, label, "--container=train", "--follow", "--prefix", "--max-log-requests=10000"]
        ],
        ("status",): [
            ["get", "jobset", "vit", "--namespace=default"],
            ["get", "pods", "--namespace=default", "--output=wide", label],
        ],
        ("stop",): [[*patch, '--patch={"spec":{"suspend":true}}']],
        ("resume",): [[*patch, '--patch={"spec":{"suspend":false}}']],
        ("delete", "--yes"): [["delete", "jobset", "vit", "--namespace=default"]],
    }
    for arguments, commands in expected.items():
        _, printed, _ = world.run("gke.sh", *arguments, "--name=vit", "--dry_run")
        assert world.calls() == []
        assert world.run("gke.sh", *arguments, "--name=vit")[0] == 0
        calls = [["kubectl", *command] for command in commands]
        assert world.calls() == calls == printed_commands(printed, "kubectl")
    assert world.run("gke.sh", "delete", "--name=vit", answer="no\n")[0] == 1
    assert world.calls() == []
