"""Names of inputs, as small functions of the wildcards that read as English."""


def manifest(artifact):
    """The file that says that an artifact is done."""
    return f"{artifact}.manifest.json"


def base_models(wildcards):
    """Model folders of the agents, in actor order."""
    return [f"results/models/{name}" for name in experiment_of(wildcards).team.model_names()]


def base_model_manifests(wildcards):
    return [manifest(folder) for folder in dict.fromkeys(base_models(wildcards))]


def base_model_arguments(wildcards):
    return options("model", base_models(wildcards))


def seed_folder(wildcards):
    return f"results/{wildcards.experiment}/seed{wildcards.seed}"


def collection_table(wildcards, preferences, table):
    """A table of the collection that some preferences compare."""
    collection = experiment_of(wildcards).preferences[preferences].collection
    return f"{seed_folder(wildcards)}/collections/{collection}/{table}.parquet"


def preferences_of_reward_model(wildcards):
    return experiment_of(wildcards).reward_models[wildcards.reward_model].preferences


def pairs_table(wildcards, preferences):
    return f"{seed_folder(wildcards)}/preferences/{preferences}/pairs.parquet"


def reward_model_backbone(wildcards):
    experiment = experiment_of(wildcards)
    given = experiment.reward_models[wildcards.reward_model].model
    return f"results/models/{given or experiment.team.model_names()[0]}"


def trained_methods(experiment):
    return [name for name, method in experiment.methods.items() if not isinstance(method, Base)]


def with_validation():
    """Experiments that keep validation items apart."""
    return [name for name, experiment in project.experiments.items() if experiment.items.has_validation()]


def without_validation():
    return [name for name in project.experiments if name not in with_validation()]


def names_or_none(names):
    """A pattern that is one of the names."""
    return "|".join(re.escape(name) for name in names) or "(?!)"


def splits_of(experiment):
    return ["train", "eval", *(["validation"] if experiment.items.has_validation() else [])]


def policy_of(wildcards):
    """The policy of a method's last round; the base team has none."""
    if isinstance(method_of(wildcards), Base):
        return []
    return f"{seed_folder(wildcards)}/methods/{wildcards.method}/round001/policy"


def training_inputs(wildcards):
    """What a method trains on, by the name of the command line's option."""
    method = method_of(wildcards)
    if isinstance(method, Madpo):
        return preference_inputs(wildcards, method)
    inputs = {"items": f"results/{wildcards.experiment}/split/train.parquet"}
    if method.eval_interval:
        inputs["validation"] = f"results/{wildcards.experiment}/split/validation.parquet"
    if method.reward_model is not None:
        inputs["reward-model"] = f"{seed_folder(wildcards)}/reward_models/{method.reward_model}"
    return inputs


def preference_inputs(wildcards, method):
    folder = f"{seed_folder(wildcards)}/methods/{wildcards.method}/round{wildcards.round}"
    inputs = {
        "training-pairs": f"{folder}/training_pairs.parquet",
        "pairs": pairs_table(wildcards, method.preferences),
        "completions": collection_table(wildcards, method.preferences, "completions"),
        "rewards": collection_table(wildcards, method.preferences, "rewards"),
    }
    if method.reference != "none":
        inputs["reference-log-probs"] = f"{folder}/reference_log_probs.parquet"
    return inputs


def critic_models(wildcards):
    """Model folders that the separate critics of a method start from."""
    names = critic_models_of(method_of(wildcards), experiment_of(wildcards).team)
    return [f"results/models/{name}" for name in names]


def trained_model_manifests(wildcards):
    """Manifests of the models of agents and critics."""
    folders = base_models(wildcards) + critic_models(wildcards)
    return [manifest(folder) for folder in dict.fromkeys(folders)]


def training_arguments(wildcards):
    given = [text for name, path in training_inputs(wildcards).items() for text in options(name, [path])]
    return base_model_arguments(wildcards) + options("critic-model", critic_models(wildcards)) + given


def adapted_models(wildcards):
    """Base models of a policy that is adapters; none where the policy is whole."""
    method = method_of(wildcards)
    is_lora = isinstance(method, PolicyTraining) and method.lora is not None
    return base_models(wildcards) if is_lora else []


def team_arguments(wildcards):
    return base_model_arguments(wildcards) + options("policy", filter(None, [policy_of(wildcards)]))


def base_metrics(wildcards):
    """Metrics of the untrained team, where the experiment evaluates it."""
    names = [name for name, method in experiment_of(wildcards).methods.items() if isinstance(method, Base)]
    return [f"{seed_folder(wildcards)}/methods/{name}/evaluation/metrics.json" for name in names[:1]]


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
    found += [f"{folder}/split/{name}.parquet" for name in splits_of(experiment)]
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


def reports():
    return [f"results/{experiment}/report/report.html" for experiment in project.experiments]


def cards():
    return [
        f"results/{name}/seed{seed}/methods/{method}/card.md"
        for name, experiment in project.experiments.items()
        for seed, method in product(experiment.seeds, trained_methods(experiment))
    ]


def everything():
    """Manifests of all that the reports and cards are made from.

    They are targets too: a stage that failed or was killed leaves its output missing, and where the report of an
    earlier run still stands nothing else would ask for it again.
    """
    found = []
    for name, experiment in project.experiments.items():
        found += listed_artifacts(SimpleNamespace(experiment=name))
        for seed in experiment.seeds:
            folder = f"results/{name}/seed{seed}"
            found += [f"{folder}/reward_models/{model}" for model in used_reward_models(experiment)]
            for method, settings in experiment.methods.items():
                found += [
                    f"{folder}/methods/{method}/evaluation/{table}" for table in ("evaluation.parquet", "metrics.json")
                ]
                if isinstance(settings, Base):
                    continue
                found += [f"{folder}/methods/{method}/round001/policy"]
                if isinstance(settings, Madpo):
                    found += [f"{folder}/methods/{method}/round001/training_pairs.parquet"]
                    if settings.reference != "none":
                        found += [f"{folder}/methods/{method}/round001/reference_log_probs.parquet"]
    return [manifest(path) for path in dict.fromkeys(found)]
