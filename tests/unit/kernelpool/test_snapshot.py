from hypothesis import given
from hypothesis import strategies as st

from kernelpool.snapshot import EMPTY, Changes, Snapshot, diff

FILES = st.dictionaries(
    st.sampled_from("abcdef"), st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3))
)


@given(FILES, FILES)
def test_changes_lead_from_one_snapshot_to_the_other(
    old: dict[str, tuple[int, int, int]], new: dict[str, tuple[int, int, int]]
) -> None:
    changes = diff(Snapshot(old, 0), Snapshot(new, 0))
    files = {path: file for path, file in old.items() if path not in changes.deleted}
    files |= {path: new[path] for path in (*changes.created, *changes.modified)}
    assert files == new
    assert not set(changes.created) & old.keys()
    assert set(changes.modified) <= old.keys() & new.keys()
    assert bool(changes) == (old != new)


def test_an_unsettled_file_counts_as_modified_once() -> None:
    file = {"log.txt": (1, 10, 5)}
    first, second = Snapshot(file, 0, unsettled=frozenset(file)), Snapshot(file, 9)
    assert diff(first, second) == Changes(modified=("log.txt",))
    assert diff(second, Snapshot(file, 20)) == Changes()


def test_a_truncated_snapshot_claims_no_deletions_and_only_new_files_as_created() -> None:
    before = Snapshot({"a": (1, 1, 5)}, 10, truncated=True)
    after = Snapshot({"old": (2, 1, 6), "new": (3, 1, 12)}, 20, truncated=True)
    assert diff(before, after) == Changes(created=("new",))


def test_everything_is_created_in_an_empty_workspace() -> None:
    assert diff(EMPTY, Snapshot({"a": (1, 1, 1)}, 2)) == Changes(created=("a",))
