"""The command lines of docs/cluster.md, run as they stand there, with gloo on the CPU."""

import re
import shlex
import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from paths import ROOT
from program_server import Server

from mupscale.models.checkpoint import load_checkpoint

pytestmark = pytest.mark.slow


class Lines(Server):
    """Runs command lines in a folder with the project's configurations."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, INTERRUPTED_IMPORTS="launched")
        self.folder = folder
        (folder / "configs").symlink_to(ROOT / "configs")

    def answers(self, *lines: str, environments: Sequence[dict[str, str]] = ({},)) -> tuple[list[int], str]:
        """Exit statuses and output of lines that run at once, each with its environment or all with one."""
        self.log.write_text("")
        requests = [
            {"module": "launched", "arguments": [str(self.folder), environment, *shlex.split(line)]}
            for line, environment in zip(lines, environments * (len(lines) // len(environments)), strict=True)
        ]
        self.start_together(*requests)
        return [self.answer() for _ in lines], self.log.read_text()

    def succeed(self, *lines: str, environments: Sequence[dict[str, str]] = ({},)) -> str:
        """The output of lines that run at once and must succeed."""
        statuses, output = self.answers(*lines, environments=environments)
        assert statuses == [0] * len(lines), output
        return output

    def refused(self, line: str) -> str:
        """The line of mupscale in the output of a line that must fail; every process may print it."""
        statuses, output = self.answers(line)
        errors = {text for text in output.splitlines() if text.startswith("error: ")}
        assert statuses == [1]
        assert len(errors) == 1, output
        return errors.pop()


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lines]:
    with Lines(tmp_path_factory.mktemp("lines")) as made:
        yield made


def documented() -> list[str]:
    """The command lines that the page says need no GPU."""
    page = (ROOT / "docs/cluster.md").read_text()
    section = page.partition("### Try it on a CPU\n")[2].partition("\n### ")[0]
    blocks = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    return [block.replace("\\\n", " ").strip() for block in blocks]


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return int(found.getsockname()[1])


def loss(output: str, steps: int) -> float:
    """The last loss of a run that has come so far."""
    assert f"{steps} steps, width 256, 147,463 parameters" in output
    found = re.findall(r"training loss of the last batch ([\d.]+)", output)
    return float(found[0])


def test_the_documented_lines(lines: Lines) -> None:
    sharded, on_two_nodes, alone, ddp = documented()
    first = loss(lines.succeed(sharded), 40)
    endpoint = f"localhost:{free_port()}"
    node = on_two_nodes.replace("$HEAD", endpoint)
    loss(lines.succeed(node, node), 50)
    loss(lines.succeed(alone), 60)
    checkpoints = lines.folder / "runs/quickstart/version_0/checkpoints"
    kept = load_checkpoint(checkpoints / "pre-upscale-30.ckpt")
    assert kept["hyper_parameters"]["width"] == 64
    assert len(list((checkpoints / "pre-upscale-30.ckpt").glob("*.distcp"))) == 2
    assert len(list((checkpoints / "resume/step=50.ckpt").glob("*.distcp"))) == 4
    assert loss(lines.succeed(ddp), 40) == pytest.approx(first, abs=1e-4)
    file = load_checkpoint(lines.folder / "runs/quickstart/version_1/checkpoints/pre-upscale-30.ckpt")
    for name, tensor in file["state_dict"].items():
        assert torch.allclose(tensor, kept["state_dict"][name], atol=1e-4), name


def test_slurm(lines: Lines) -> None:
    """Two tasks as srun starts them: Lightning knows them by these variables."""
    command = (
        "python -m mupscale fit --config configs/quickstart.yaml --callback_args='{UpscaleCallback: {at_step: 3}}' "
        "--trainer.max_steps=5 --trainer.devices=2 --trainer.strategy=fsdp2 --trainer.logger.name=slurm"
    )
    job = {"SLURM_JOB_ID": str(free_port()), "SLURM_JOB_NAME": "growth", "SLURM_NODELIST": "localhost"}
    job |= {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_NODEID": "0"}
    tasks = [job | {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    output = lines.succeed(command, command, environments=tasks)
    loss(output, 5)
    assert "MEMBER: 2/2" in output


FIT = "-m mupscale fit --config configs/quickstart.yaml --trainer.strategy=fsdp2 --trainer.logger.name=refused"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            f"torchrun --standalone --nproc-per-node=3 {FIT} --trainer.devices=3",
            "batch_size=200, the global batch, must be a positive multiple of the 3 ranks",
        ),
        (
            f"torchrun --standalone --nproc-per-node=2 {FIT} --trainer.devices=4",
            "but the product (4 * 1) does not match the world size (2)",
        ),
        (
            f"python {FIT} --trainer.devices=1 --trainer.callbacks+=EMAWeightAveraging",
            "EMAWeightAveraging cannot copy the shards of fsdp2",
        ),
        (f"python {FIT} --trainer.num_nodes=2", "trainer.num_nodes = 2, but neither torchrun nor srun has started"),
        (f"python {FIT} --trainer.accelerator=gpu --trainer.devices=99", "gpu"),
    ],
    ids=[
        "a batch for three",
        "more processes than started",
        "EMA",
        "nodes that nobody starts",
        "GPUs that are not there",
    ],
)
def test_what_processes_cannot_do(line: str, message: str, lines: Lines) -> None:
    assert message in lines.refused(line)
    assert not (lines.folder / "runs/refused").exists()
