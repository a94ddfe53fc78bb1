"""Models and items.

in:  config/models/<model>.yaml, the task and its items
out: results/models/<model>/, results/<experiment>/split/{train,eval[,validation]}.parquet
"""


rule prepare:
    output:
        model=directory("results/models/{model}"),
        manifest="results/models/{model}.manifest.json",
    log:
        "results/models/{model}.log",
    benchmark:
        "results/models/{model}.benchmark.jsonl"
    threads: 2
    params:
        **tracked("prepare"),
    shell:
        "exec comlrl-stages prepare --output {output.model:q} {params:q} > {log:q} 2>&1"


SPLIT = f"results/{{experiment,{names_or_none(without_validation())}}}/split"
SPLIT_IN_THREE = f"results/{{experiment,{names_or_none(with_validation())}}}/split"


rule split:
    output:
        train=f"{SPLIT}/train.parquet",
        eval=f"{SPLIT}/eval.parquet",
        train_manifest=f"{SPLIT}/train.parquet.manifest.json",
        eval_manifest=f"{SPLIT}/eval.parquet.manifest.json",
    log:
        "results/{experiment}/split/split.log",
    benchmark:
        "results/{experiment}/split/split.benchmark.jsonl"
    params:
        **tracked("split"),
    shell:
        "exec comlrl-stages split --train {output.train:q} --eval {output.eval:q} {params:q} > {log:q} 2>&1"


rule split_with_validation:
    output:
        train=f"{SPLIT_IN_THREE}/train.parquet",
        eval=f"{SPLIT_IN_THREE}/eval.parquet",
        validation=f"{SPLIT_IN_THREE}/validation.parquet",
        train_manifest=f"{SPLIT_IN_THREE}/train.parquet.manifest.json",
        eval_manifest=f"{SPLIT_IN_THREE}/eval.parquet.manifest.json",
        validation_manifest=f"{SPLIT_IN_THREE}/validation.parquet.manifest.json",
    log:
        "results/{experiment}/split/split.log",
    benchmark:
        "results/{experiment}/split/split.benchmark.jsonl"
    params:
        **tracked("split"),
    shell:
        "exec comlrl-stages split --train {output.train:q} --eval {output.eval:q} --validation {output.validation:q} "
        "{params:q} > {log:q} 2>&1"
