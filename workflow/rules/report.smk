"""The report of an experiment.

in:  evaluations, training logs, reward models
out: results/<experiment>/report/{report.html,summary.csv,summary.parquet,summary.md,figures/}
"""


def evaluations(wildcards):
    experiment = experiment_of(wildcards)
    return [
        f"results/{wildcards.experiment}/seed{seed}/methods/{method}/evaluation/evaluation.parquet"
        for method, seed in product(experiment.methods, experiment.seeds)
    ]


def reward_models(wildcards):
    experiment = experiment_of(wildcards)
    return [
        f"results/{wildcards.experiment}/seed{seed}/reward_models/{name}"
        for name, seed in product(used_reward_models(experiment), experiment.seeds)
    ]


def training_logs(wildcards):
    experiment = experiment_of(wildcards)
    policies = [
        f"results/{wildcards.experiment}/seed{seed}/methods/{method}/round001/training_log.parquet"
        for method, seed in product(trained_methods(experiment), experiment.seeds)
    ]
    return policies + [f"{folder}.training_log.parquet" for folder in reward_models(wildcards)]


def listed_artifacts(wildcards):
    """Further artifacts whose counts, times and provenance the report shows."""
    experiment = experiment_of(wildcards)
    folder = f"results/{wildcards.experiment}"
    found = [f"results/models/{name}" for name in dict.fromkeys(experiment.team.model_names())]
    found += [f"{folder}/split/train.parquet", f"{folder}/split/eval.parquet"]
    for seed in experiment.seeds:
        preferences = {
            *(model.preferences for model in used_reward_models(experiment).values()),
            *(method.preferences for method in experiment.methods.values() if isinstance(method, Madpo)),
        }
        for name in sorted(preferences):
            collection = f"{folder}/seed{seed}/collections/{experiment.preferences[name].collection}"
            found += [f"{collection}/completions.parquet", f"{collection}/rewards.parquet"]
            found += [f"{folder}/seed{seed}/preferences/{name}/pairs.parquet"]
        for method in trained_methods(experiment):
            found += [f"{folder}/seed{seed}/methods/{method}/export"]
        for method in experiment.methods:
            found += [f"{folder}/seed{seed}/methods/{method}/evaluation/completions.parquet"]
    return list(dict.fromkeys(found))


def report_arguments(wildcards):
    return [
        f"--output=results/{wildcards.experiment}/report",
        *options("evaluation", evaluations(wildcards)),
        *options("training-log", training_logs(wildcards)),
        *options("reward-model", reward_models(wildcards)),
        *options("artifact", listed_artifacts(wildcards)),
    ]


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
