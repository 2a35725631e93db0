"""Ways to end spans and to come to an end (rows L1 to L7): nothing is lost, nothing is doubled."""

from pathlib import Path

from tests.faults.harness import Host, trials


def test_burst_of_one_thread_loses_nothing(tmp_path: Path) -> None:
    """L1: spans of 2 KB as fast as one thread can."""
    host = Host(
        tmp_path,
        """
        for number in range(int(sys.argv[1])):
            end(str(number), 2000)
        print("done")
        """,
    )

    host.check(trials(100_000, 3_000))
