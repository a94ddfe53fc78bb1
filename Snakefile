"""Cooperative training of teams of LLM agents, from task items to a report.

    snakemake --cores all                                          the experiments of config/config.yaml
    snakemake --cores all --config experiments='[smollm2]'         others
    snakemake -n                                                   what would run, and which setting is why

The stages are listed in order of execution; README.md has a picture.
"""

import sys
from pathlib import Path

from snakemake.utils import min_version

from comlrl_stages.errors import UserError
from comlrl_stages.project import read_yaml

min_version("9.19")

CONFIG_FILE = Path(workflow.basedir) / "config" / "config.yaml"

try:
    read_yaml(CONFIG_FILE)  # Snakemake reads it next, but would not say in which line a mistake is
except UserError as error:
    sys.exit(f"error: {error}")


configfile: CONFIG_FILE


# Used only with --software-deployment-method apptainer: name an image here in which this project is installed.
container: "docker://python:3.11"


include: "workflow/rules/common.smk"
include: "workflow/rules/inputs.smk"
include: "workflow/rules/prepare.smk"
include: "workflow/rules/preferences.smk"
include: "workflow/rules/train.smk"
include: "workflow/rules/evaluate.smk"
include: "workflow/rules/report.smk"


rule all:
    default_target: True
    input:
        reports(),
        cards(),
        everything(),
    localrule: True
