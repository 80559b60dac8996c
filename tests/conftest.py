"""Fixtures that every test may use, and where scratch data lie."""

import os
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from fixtures_safety import Forge
from hypothesis import HealthCheck, settings

# Examples read and write files: how long one takes says nothing on a busy machine.
settings.register_profile(
    "shardwright", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("shardwright")

# Scratch data go into memory where there is room: no test is about a disk, and waiting until files
# are durable was half of the suite's time.
MEMORY = Path("/dev/shm")
NEEDED_BYTES = 4 << 30  # several times what the suite has at once
ROOTS = ("PYTEST_DEBUG_TEMPROOT", "TMPDIR")  # of pytest, and of everybody


def pytest_configure(config: pytest.Config) -> None:
    """Choose the root of scratch data, unless somebody has chosen it."""
    chosen = config.option.basetemp is not None or os.environ.keys() & set(ROOTS)
    if not chosen and _has_room(MEMORY):
        os.environ[ROOTS[0]] = str(MEMORY)


# Files that take longest, with what else they wait for: with several workers, one that begins them
# last would work alone. Ranks and work of one process alternate.
FIRST = (
    "test_train_resume", "test_crash", "test_accelerator", "test_roundtrip", "test_train_command",
    "test_megatron_loads", "test_reported", "test_common_issues", "test_hostile",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first, then all others in their order."""
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(FIRST)))


def _has_room(folder: Path) -> bool:
    """Whether it is a file system of enough memory, from which programs may be run."""
    if not os.access(folder, os.W_OK) or not Path("/proc/meminfo").exists():
        return False
    info, found = os.statvfs(folder), Path("/proc/meminfo").read_text().split()
    available = 1024 * int(found[found.index("MemAvailable:") + 1])
    programs = not info.f_flag & getattr(os, "ST_NOEXEC", 0)
    return programs and min(available, info.f_bavail * info.f_frsize) >= NEEDED_BYTES


@pytest.fixture(scope="session")
def forge() -> Iterator[Forge]:
    """A process whose forks are runs to kill."""
    with Forge() as made:
        yield made


# Checkpoints written by other tools. They are too large for the repository and lie beside it.
GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of golden checkpoints; a test that asks for it is skipped where it is absent."""
    if not GOLDEN.is_dir():
        pytest.skip(f"no golden checkpoints: {GOLDEN} does not exist")
    return GOLDEN


@pytest.fixture(scope="session")
def golden_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The second golden set: experts, latent attention, pipeline layouts."""
    packed = GOLDEN.with_name("golden-moe.tar.xz")
    if not packed.is_file():
        pytest.skip(f"no golden checkpoints: {packed} does not exist")
    into = tmp_path_factory.mktemp("golden-moe")
    with tarfile.open(packed) as archive:
        archive.extractall(into, filter="data")
    return into / "golden-moe"
