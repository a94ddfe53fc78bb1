"""Evaluation and export.

in:  policies, eval and training items
out: methods/<m>/evaluation/{completions,evaluation}.parquet, metrics.json; methods/<m>/export/, card.md
"""


rule sample_evaluation:
    input:
        models=base_model_manifests,
        policy=lambda w: [manifest(policy_of(w))] if policy_of(w) else [],
        items_manifest="results/{experiment}/split/eval.parquet.manifest.json",
        task_items=ancient("results/{experiment}/split/eval.parquet"),
        train_manifest="results/{experiment}/split/train.parquet.manifest.json",
        train=ancient("results/{experiment}/split/train.parquet"),
    output:
        completions=f"{METHOD}/evaluation/completions.parquet",
        manifest=f"{METHOD}/evaluation/completions.parquet.manifest.json",
    log:
        f"{METHOD}/evaluation/completions.log",
    benchmark:
        f"{METHOD}/evaluation/completions.benchmark.jsonl"
    threads: torch_threads
    params:
        **tracked("sample_evaluation"),
        **arguments("sample_evaluation", team_arguments),
        log_seconds=runtime("log_seconds"),
    shell:
        "exec comlrl-stages sample-evaluation --items {input.task_items:q} --train-items {input.train:q} "
        "--output {output.completions:q} {params:q} > {log:q} 2>&1"


rule evaluate:
    input:
        items_manifest="results/{experiment}/split/eval.parquet.manifest.json",
        task_items=ancient("results/{experiment}/split/eval.parquet"),
        train_manifest="results/{experiment}/split/train.parquet.manifest.json",
        train=ancient("results/{experiment}/split/train.parquet"),
        completions_manifest=f"{METHOD}/evaluation/completions.parquet.manifest.json",
        completions=ancient(f"{METHOD}/evaluation/completions.parquet"),
    output:
        evaluation=f"{METHOD}/evaluation/evaluation.parquet",
        metrics=f"{METHOD}/evaluation/metrics.json",
        manifest=f"{METHOD}/evaluation/evaluation.parquet.manifest.json",
        metrics_manifest=f"{METHOD}/evaluation/metrics.json.manifest.json",
    log:
        f"{METHOD}/evaluation/evaluation.log",
    benchmark:
        f"{METHOD}/evaluation/evaluation.benchmark.jsonl"
    threads: score_workers
    params:
        **tracked("evaluate"),
        workers=runtime("score_workers"),
        tracking=tracking("evaluate"),
    shell:
        "exec comlrl-stages evaluate --items {input.task_items:q} --train-items {input.train:q} "
        "--completions {input.completions:q} --output {output.evaluation:q} --metrics {output.metrics:q} "
        "{params:q} > {log:q} 2>&1"


rule export:
    input:
        models=lambda w: [manifest(folder) for folder in dict.fromkeys(adapted_models(w))],
        policy_manifest=lambda w: manifest(policy_of(w)),
        policy=lambda w: ancient(policy_of(w)),
    output:
        export=directory(f"{METHOD}/export"),
        manifest=f"{METHOD}/export.manifest.json",
    log:
        f"{METHOD}/export.log",
    benchmark:
        f"{METHOD}/export.benchmark.jsonl"
    params:
        **tracked("export"),
        **arguments("export", lambda w: options("model", adapted_models(w))),
    shell:
        "exec comlrl-stages export --policy {input.policy:q} --output {output.export:q} {params:q} > {log:q} 2>&1"


rule card:
    input:
        export_manifest=f"{METHOD}/export.manifest.json",
        export=ancient(f"{METHOD}/export"),
        metrics_manifest=f"{METHOD}/evaluation/metrics.json.manifest.json",
        metrics=ancient(f"{METHOD}/evaluation/metrics.json"),
        base_manifests=lambda w: [manifest(path) for path in base_metrics(w)],
        base=lambda w: [ancient(path) for path in base_metrics(w)],
    output:
        card=report(
            f"{METHOD}/card.md",
            category="{experiment}",
            subcategory="model cards",
            labels={"method": "{method}", "seed": "{seed}"},
            caption="../report/card.rst",
        ),
        manifest=f"{METHOD}/card.md.manifest.json",
    log:
        f"{METHOD}/card.log",
    benchmark:
        f"{METHOD}/card.benchmark.jsonl"
    params:
        **tracked("card"),
        **arguments("card", lambda w: options("base-metrics", base_metrics(w))),
    shell:
        "exec comlrl-stages card --export {input.export:q} --metrics {input.metrics:q} --output {output.card:q} "
        "{params:q} > {log:q} 2>&1"
