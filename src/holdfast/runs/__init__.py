"""Run directories: the files of a run, written so that a killed process leaves a valid run."""

from holdfast.runs.audit_check import AuditReport, read_audit, verify_audit
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.client_states import ClientStates
from holdfast.runs.directory import RunDirectory
from holdfast.runs.summary import RunSummary, list_runs

__all__ = [
    "AuditReport",
    "Checkpoint",
    "ClientStates",
    "RunDirectory",
    "RunSummary",
    "list_runs",
    "read_audit",
    "verify_audit",
]
