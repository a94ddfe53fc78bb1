"""Training.

in:  models, training and validation items, pairs and their completions
out: reward_models/<r>/, methods/<m>/round<ddd>/{training_pairs,reference_log_probs}.parquet, policy/, training_log.parquet
"""


rule reward:
    input:
        model_manifest=lambda w: manifest(reward_model_backbone(w)),
        model=lambda w: ancient(reward_model_backbone(w)),
        items_manifest="results/{experiment}/split/train.parquet.manifest.json",
        task_items=ancient("results/{experiment}/split/train.parquet"),
        pairs_manifest=lambda w: manifest(pairs_table(w, preferences_of_reward_model(w))),
        pairs=lambda w: ancient(pairs_table(w, preferences_of_reward_model(w))),
        completions_manifest=lambda w: manifest(collection_table(w, preferences_of_reward_model(w), "completions")),
        completions=lambda w: ancient(collection_table(w, preferences_of_reward_model(w), "completions")),
        rewards_manifest=lambda w: manifest(collection_table(w, preferences_of_reward_model(w), "rewards")),
        rewards=lambda w: ancient(collection_table(w, preferences_of_reward_model(w), "rewards")),
    output:
        reward_model=directory(f"{SEED}/reward_models/{{reward_model}}"),
        training_log=f"{SEED}/reward_models/{{reward_model}}.training_log.parquet",
        manifest=f"{SEED}/reward_models/{{reward_model}}.manifest.json",
        log_manifest=f"{SEED}/reward_models/{{reward_model}}.training_log.parquet.manifest.json",
    log:
        f"{SEED}/reward_models/{{reward_model}}.log",
    benchmark:
        f"{SEED}/reward_models/{{reward_model}}.benchmark.jsonl"
    threads: torch_threads
    params:
        **tracked("reward"),
        log_seconds=runtime("log_seconds"),
        checkpoints=runtime("checkpoint_interval"),
        tracking=tracking("reward"),
    shell:
        "exec comlrl-stages reward --model {input.model:q} --items {input.task_items:q} --pairs {input.pairs:q} "
        "--completions {input.completions:q} --rewards {input.rewards:q} --output {output.reward_model:q} "
        "--training-log {output.training_log:q} {params:q} > {log:q} 2>&1"


rule replay:
    input:
        pairs_manifest=lambda w: manifest(pairs_table(w, method_of(w).preferences)),
        pairs=lambda w: ancient(pairs_table(w, method_of(w).preferences)),
    output:
        training_pairs=f"{ROUND}/training_pairs.parquet",
        manifest=f"{ROUND}/training_pairs.parquet.manifest.json",
    log:
        f"{ROUND}/training_pairs.log",
    benchmark:
        f"{ROUND}/training_pairs.benchmark.jsonl"
    params:
        **tracked("replay"),
    shell:
        "exec comlrl-stages replay --pairs {input.pairs:q} --output {output.training_pairs:q} {params:q} > {log:q} 2>&1"


rule refer:
    input:
        models=base_model_manifests,
        pairs_manifest=lambda w: manifest(pairs_table(w, method_of(w).preferences)),
        pairs=lambda w: ancient(pairs_table(w, method_of(w).preferences)),
        completions_manifest=lambda w: manifest(collection_table(w, method_of(w).preferences, "completions")),
        completions=lambda w: ancient(collection_table(w, method_of(w).preferences, "completions")),
        rewards_manifest=lambda w: manifest(collection_table(w, method_of(w).preferences, "rewards")),
        rewards=lambda w: ancient(collection_table(w, method_of(w).preferences, "rewards")),
    output:
        log_probs=f"{ROUND}/reference_log_probs.parquet",
        manifest=f"{ROUND}/reference_log_probs.parquet.manifest.json",
    log:
        f"{ROUND}/reference_log_probs.log",
    benchmark:
        f"{ROUND}/reference_log_probs.benchmark.jsonl"
    threads: torch_threads
    params:
        **tracked("refer"),
        **arguments("refer", base_model_arguments),
        log_seconds=runtime("log_seconds"),
    shell:
        "exec comlrl-stages refer --pairs {input.pairs:q} --completions {input.completions:q} --rewards {input.rewards:q} "
        "--output {output.log_probs:q} {params:q} > {log:q} 2>&1"


rule optimize:
    input:
        models=trained_model_manifests,
        data_manifests=lambda w: [manifest(path) for path in training_inputs(w).values()],
        data=lambda w: [ancient(path) for path in training_inputs(w).values()],
    output:
        policy=directory(f"{ROUND}/policy"),
        training_log=f"{ROUND}/training_log.parquet",
        manifest=f"{ROUND}/policy.manifest.json",
        log_manifest=f"{ROUND}/training_log.parquet.manifest.json",
    log:
        f"{ROUND}/policy.log",
    benchmark:
        f"{ROUND}/policy.benchmark.jsonl"
    threads: torch_threads
    params:
        **tracked("optimize"),
        **arguments("optimize", training_arguments),
        log_seconds=runtime("log_seconds"),
        checkpoints=runtime("checkpoint_interval"),
        workers=runtime("score_workers"),
        keep_checkpoints=keep_checkpoints,
        tracking=tracking("optimize"),
    shell:
        "exec comlrl-stages optimize --output {output.policy:q} --training-log {output.training_log:q} "
        "{params:q} > {log:q} 2>&1"
