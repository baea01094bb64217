"""Looking operations up by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

import operations


def test_shipped_operation_is_listed_and_found() -> None:
    assert "kda_prefill" in operations.names()
    assert operations.get("kda_prefill").name == "kda_prefill"


def test_unknown_name_names_the_nearest_one() -> None:
    with pytest.raises(operations.UnknownOperationError, match="did you mean 'kda_prefill'"):
        operations.get("kda_prefil")


def test_unknown_name_without_a_near_one_lists_what_there_is() -> None:
    with pytest.raises(operations.UnknownOperationError, match=r"known: .*kda_prefill"):
        operations.get("zzz")


def test_reading_an_operation_does_not_import_torch() -> None:
    code = (
        "import sys, operations\n"
        "op = operations.get('kda_prefill')\n"
        "assert op.regimes and op.workloads and op.reduced() and op.contract.served\n"
        "assert op.floor_bytes(op.tuned()[0]) > 0\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_operations_imports_no_other_package_of_the_project() -> None:
    code = (
        "import sys, operations\n"
        "import operations._delta_rule.oracle, operations._delta_rule.compare\n"
        "import operations.kda_prefill._generators, operations.gdn_prefill._generators\n"
        "bad = {m.split('.')[0] for m in sys.modules} & {'candidates', 'factory', 'leaderboard'}\n"
        "sys.exit(', '.join(sorted(bad)) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
