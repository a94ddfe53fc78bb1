"""The report of an experiment.

in:  evaluations, training logs, reward models
out: results/<experiment>/report/{report.html,summary.csv,summary.parquet,summary.md,figures/}, and beside what the
     manifest lists cost/cost.html: wall times, memory, hosts
"""


rule report:
    input:
        evaluations=lambda w: [manifest(path) for path in evaluations(w)],
        training_logs=lambda w: [manifest(path) for path in training_logs(w)],
        reward_models=lambda w: [manifest(path) for path in reward_models(w)],
        listed=lambda w: [manifest(path) for path in listed_artifacts(w)],
    output:
        page=report(
            "results/{experiment}/report/report.html",
            category="{experiment}",
            labels={"what": "report"},
            caption="../report/report.rst",
        ),
        summary=report(
            "results/{experiment}/report/summary.csv",
            category="{experiment}",
            labels={"what": "summary"},
            caption="../report/summary.rst",
        ),
        manifest="results/{experiment}/report.manifest.json",
    log:
        "results/{experiment}/report.log",
    benchmark:
        "results/{experiment}/report.benchmark.jsonl"
    params:
        **tracked("report"),
        **arguments("report", report_arguments),
    shell:
        "exec comlrl-stages report {params:q} > {log:q} 2>&1"
