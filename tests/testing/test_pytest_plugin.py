"""``pytest --solver``: what it runs, skips, refuses and prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from remat.plugins import registry

CLONE = Path(__file__).parents[2]
#: In processes of their own, importing Hypothesis takes longer than all else.
LIGHT = ("-p", "no:hypothesispytest")

SOLVER_TEST = """
    import pytest
    from remat.solvers.run import run
    from remat.testing.cases import cases

    def test_solver(solver):
        assert solver.name

    @pytest.mark.parametrize("case", cases()[:12], ids=lambda case: case.name)
    def test_case(solver, case):
        assert run(solver, case.problem).value <= case.optimum

    def test_other():
        pass
"""

MINE = """
    from remat import Solver

    class Mine(Solver):
        name = "mine"

        def solve(self, problem, **kwargs):
            return []

    class Liar(Mine):
        name = "liar"

        def solve(self, problem, **kwargs):
            return range(len(problem.weights))

    class Needy(Mine):
        name = "needy"
        requires = ("no_such_module_here",)

    no_solver = 3
"""


@pytest.fixture(autouse=True)
def _folder(pytester: pytest.Pytester) -> None:
    """A folder with some solvers, and without our own settings."""
    pytester.makeini("[pytest]\n")
    pytester.makepyfile(mine=MINE)


def test_one_solver_and_only_the_solver_tests(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOLVER_TEST)
    result = pytester.runpytest("--solver=greedy", "-v")
    result.assert_outcomes(passed=13, deselected=1)
    result.stdout.fnmatch_lines(["*::test_solver?greedy? PASSED*"])


def test_without_the_option_and_with_all_each_solver_runs(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_solver(solver): pass\ndef test_other(): pass")
    names = registry().solver_names()
    pytester.runpytest().assert_outcomes(passed=1 + len(names))
    result = pytester.runpytest("--solver=all")
    result.assert_outcomes(passed=len(registry().solvers), deselected=1)


def test_a_solver_that_is_named_twice_runs_once(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOLVER_TEST)
    chosen = ("--solver=dp", "--solver=greedy", "--solver=mine:Mine", "--solver=dp")
    pytester.runpytest(*chosen).assert_outcomes(passed=39)


def test_a_case_of_a_kind_is_for_solvers_of_that_kind(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        """
        from types import SimpleNamespace

        import pytest
        from remat.testing.cases import cases

        CASES = [next(case for case in cases() if case.kind == k) for k in ("knapsack", "schedule")]

        @pytest.mark.parametrize("case", CASES, ids=lambda case: case.kind)
        def test_case(solver, case):
            assert case.kind in solver.solves

        @pytest.mark.parametrize("other", [SimpleNamespace(kind="f")])
        def test_what_is_of_another_kind(solver, other):
            pass
        """
    )
    for solver, passed in (("greedy", 3), ("milp", 2), ("cut", 1)):
        result = pytester.runpytest(f"--solver={solver}")
        result.assert_outcomes(passed=passed, deselected=3 - passed)


def test_a_wrong_answer_fails(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOLVER_TEST)
    result = pytester.runpytest("--solver=mine:Liar")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines(["*SolverError: solver 'liar' returned an overweight choice*"])


def test_a_missing_package_is_a_visible_skip(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("def test_solver(solver): pass")
    pytester.makepyfile(lacking="import no_such_module_here\nclass Mine: pass")
    result = pytester.runpytest("--solver=mine:Needy", "--solver=lacking:Mine")
    result.assert_outcomes(skipped=2)
    assert result.ret == pytest.ExitCode.OK
    result.stdout.fnmatch_lines(
        [
            "--solver=mine:Needy: skipped, module 'no_such_module_here' is not installed: pip *",
            "--solver=lacking:Mine: skipped, module 'no_such_module_here' is not installed",
        ]
    )


@pytest.mark.parametrize("workers", [(), ("-n", "1", *LIGHT)])
def test_nothing_to_run_is_a_failure(pytester: pytest.Pytester, workers) -> None:
    pytester.makepyfile("def test_other(): pass")
    start = pytester.runpytest_subprocess if workers else pytester.runpytest
    result = start("--solver=greedy", *workers)
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["*no test collected here takes the 'solver' fixture*"])


def test_other_peoples_solver_is_left_alone(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        test_mark="""
            import pytest

            @pytest.mark.parametrize("solver", ["a", "b"])
            def test_theirs(solver):
                assert solver in "ab"
        """,
        test_fixture="""
            import pytest

            @pytest.fixture
            def solver():
                return "mine"

            def test_theirs(solver):
                assert solver == "mine"
        """,
        test_hook="""
            def pytest_generate_tests(metafunc):
                metafunc.parametrize("solver", ["x"])

            def test_theirs(solver):
                assert solver == "x"
        """,
    )
    pytester.runpytest().assert_outcomes(passed=4)
    assert pytester.runpytest("--solver=greedy").ret == pytest.ExitCode.NO_TESTS_COLLECTED


def test_the_suite_of_a_clone_needs_pytest_alone(tmp_path: Path) -> None:
    """In a clone, pytest reads its conftest.py and its options, for which Hypothesis may be missing."""
    (tmp_path / "hypothesis.py").write_text(
        "raise ModuleNotFoundError('No module named hypothesis', name='hypothesis')"
    )
    missing = [f"-pno:{name}" for name in ("hypothesispytest", "timeout", "xdist", "cacheprovider")]
    kit = ("--pyargs", "remat.testing", "--solver=greedy", "-k", "test_any_problem or one-item")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *kit, *missing],
        capture_output=True,
        text=True,
        cwd=CLONE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tmp_path, CLONE)))},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout


KNOWN = """
    def test_one(solver):
        assert solver.name == "other"

    def test_two(solver):
        assert solver.name == "mine"

    def test_other():
        pass
"""


def test_known_failures_are_listed_and_strict(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(KNOWN)

    def listed(*lines: str) -> pytest.RunResult:
        (pytester.path / "list.txt").write_text("\n".join(lines))
        return pytester.runpytest("--solver=mine:Mine", "-rx", "--known-failures=list.txt")

    result = listed("# a comment", "", "test_one[mine:Mine]  # is not called other")
    result.assert_outcomes(passed=1, xfailed=1, deselected=1)
    result.stdout.fnmatch_lines(["XFAIL *test_one?mine:Mine? - is not called other*"])
    result = listed("test_one[mine:Mine]", "x.py::test_two[mine:Mine]", "test_x[greedy]")
    result.assert_outcomes(failed=1, xfailed=1, deselected=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


def test_a_worker_knows_failures_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(SOLVER_TEST + KNOWN.replace("test_other", "test_another"))
    (pytester.path / "list.txt").write_text("test_one[mine:Mine]\ntest_two[mine:Mine]")
    chosen = ("--solver=mine:Mine", "--solver=dp", "--known-failures=list.txt")
    result = pytester.runpytest_subprocess(*chosen, "-n", "1", *LIGHT)
    # With dp, nobody expects the two tests to fail: neither name is its own.
    result.assert_outcomes(passed=26, failed=3, xfailed=1)
    result.stdout.fnmatch_lines(["*XPASS(strict)*"])


@pytest.mark.parametrize(
    ("option", "said"),
    [
        (
            "--solver=gredy",
            "*--solver=gredy: unknown solver 'gredy': known are greedy, dp,*'greedy'?",
        ),
        ("--solver=nowhere:Mine", "*--solver=nowhere:Mine: *No module named 'nowhere'*"),
        ("--solver=mine:Other", "*module 'mine' has no 'Other'*"),
        ("--solver=mine:no_solver", "*'mine:no_solver' is unusable: 3 is not a class*"),
        ("--known-failures=nowhere", "*--known-failures=*nowhere: *No such file*"),
    ],
)
def test_a_wrong_name_or_list_is_a_usage_error(
    pytester: pytest.Pytester, option: str, said: str
) -> None:
    pytester.makepyfile(KNOWN)
    result = pytester.runpytest(option)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([said])


@pytest.mark.parametrize("option", ["", "--solver=greedy"])
def test_start_up_imports_no_torch(pytester: pytest.Pytester, option) -> None:
    takes = "solver" if option else ""
    heavy = {"torch", "numpy", "scipy", "ortools", "pulp"}
    if not option:
        heavy |= {"remat.solvers", "remat.plugins", "remat.testing.selection"}
    pytester.makepyfile(
        f"""
        import sys

        def test_light({takes}):
            assert not {heavy} & set(sys.modules)
        """
    )
    arguments = ["-m", "pytest", "-q", *LIGHT, *filter(None, [option])]
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, cwd=pytester.path
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout
