"""Preference collection, in three steps so that a new reward or pair rule does not sample again.

in:  models, training items
out: collections/<c>/{completions,rewards}.parquet, preferences/<p>/pairs.parquet
"""


rule sample:
    input:
        models=base_model_manifests,
        items_manifest="results/{experiment}/split/train.parquet.manifest.json",
        task_items=ancient("results/{experiment}/split/train.parquet"),
    output:
        completions=f"{SEED}/collections/{{collection}}/completions.parquet",
        manifest=f"{SEED}/collections/{{collection}}/completions.parquet.manifest.json",
    log:
        f"{SEED}/collections/{{collection}}/completions.log",
    benchmark:
        f"{SEED}/collections/{{collection}}/completions.benchmark.jsonl"
    threads: torch_threads
    params:
        **tracked("sample"),
        **arguments("sample", base_model_arguments),
        log_seconds=runtime("log_seconds"),
    shell:
        "exec comlrl-stages sample --items {input.task_items:q} --output {output.completions:q} {params:q} > {log:q} 2>&1"


rule score:
    input:
        items_manifest="results/{experiment}/split/train.parquet.manifest.json",
        task_items=ancient("results/{experiment}/split/train.parquet"),
        completions_manifest=f"{SEED}/collections/{{collection}}/completions.parquet.manifest.json",
        completions=ancient(f"{SEED}/collections/{{collection}}/completions.parquet"),
    output:
        rewards=f"{SEED}/collections/{{collection}}/rewards.parquet",
        manifest=f"{SEED}/collections/{{collection}}/rewards.parquet.manifest.json",
    log:
        f"{SEED}/collections/{{collection}}/rewards.log",
    benchmark:
        f"{SEED}/collections/{{collection}}/rewards.benchmark.jsonl"
    threads: score_workers
    params:
        **tracked("score"),
        log_seconds=runtime("log_seconds"),
        workers=runtime("score_workers"),
    shell:
        "exec comlrl-stages score --items {input.task_items:q} --completions {input.completions:q} "
        "--output {output.rewards:q} {params:q} > {log:q} 2>&1"


rule pair:
    input:
        completions_manifest=lambda w: manifest(collection_table(w, w.preferences, "completions")),
        completions=lambda w: ancient(collection_table(w, w.preferences, "completions")),
        rewards_manifest=lambda w: manifest(collection_table(w, w.preferences, "rewards")),
        rewards=lambda w: ancient(collection_table(w, w.preferences, "rewards")),
    output:
        pairs=f"{SEED}/preferences/{{preferences}}/pairs.parquet",
        manifest=f"{SEED}/preferences/{{preferences}}/pairs.parquet.manifest.json",
    log:
        f"{SEED}/preferences/{{preferences}}/pairs.log",
    benchmark:
        f"{SEED}/preferences/{{preferences}}/pairs.benchmark.jsonl"
    params:
        **tracked("pair"),
    shell:
        "exec comlrl-stages pair --rewards {input.rewards:q} --completions {input.completions:q} "
        "--output {output.pairs:q} {params:q} > {log:q} 2>&1"
