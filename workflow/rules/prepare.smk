"""Models and items.

in:  config/models/<model>.yaml, the task and its items
out: results/models/<model>/, results/<experiment>/split/{train,eval}.parquet
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


rule split:
    output:
        train="results/{experiment}/split/train.parquet",
        eval="results/{experiment}/split/eval.parquet",
        train_manifest="results/{experiment}/split/train.parquet.manifest.json",
        eval_manifest="results/{experiment}/split/eval.parquet.manifest.json",
    log:
        "results/{experiment}/split/split.log",
    benchmark:
        "results/{experiment}/split/split.benchmark.jsonl"
    params:
        **tracked("split"),
    shell:
        "exec comlrl-stages split --train {output.train:q} --eval {output.eval:q} {params:q} > {log:q} 2>&1"
