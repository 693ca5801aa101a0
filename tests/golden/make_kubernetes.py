"""Write what Kubernetes 1.37 says of a Job into tests/golden/kubernetes/.

    pip download --no-deps kubernetes-validate==1.37.0
    python tests/golden/make_kubernetes.py kubernetes_validate-1.37.0-py3-none-any.whl

Kept are the definitions that the manifest in docs/packing.md needs, without their descriptions.
"""

import json
import sys
import zipfile
from pathlib import Path
from typing import Any

DEFINITIONS = "kubernetes_validate/kubernetes-json-schema/v1.37.0-local/_definitions.json"
OUT = Path(__file__).parent / "kubernetes" / "job-1.37.json"
KEPT = (
    *("batch.v1.Job", "batch.v1.JobSpec", "core.v1.PodTemplateSpec", "core.v1.PodSpec"),
    *("core.v1.Container", "core.v1.EnvVar", "core.v1.ResourceRequirements"),
    *("core.v1.VolumeMount", "core.v1.Volume", "core.v1.PersistentVolumeClaimVolumeSource"),
    *("apis.meta.v1.ObjectMeta", "api.resource.Quantity"),
)
WORDS = ("$ref", "type", "required", "enum", "oneOf", "additionalProperties", "items")


def short(name: str) -> str:
    for long in ("#/$defs/", "io.k8s.api.", "io.k8s.apimachinery.pkg."):
        name = name.removeprefix(long)
    return name


def clean(schema: Any) -> Any:
    """Keep the words that say what is valid; names of definitions become short."""
    if isinstance(schema, list):
        return [clean(one) for one in schema]
    if not isinstance(schema, dict):
        return short(schema) if isinstance(schema, str) else schema
    found = {word: clean(schema[word]) for word in WORDS if word in schema}
    if "properties" in schema:
        found["properties"] = {name: clean(one) for name, one in schema["properties"].items()}
    return found


def main(wheel: str) -> None:
    every = json.loads(zipfile.ZipFile(wheel).read(DEFINITIONS))["$defs"]
    kept = {short(name): clean(one) for name, one in every.items() if short(name) in KEPT}
    lines = ",\n".join(f" {json.dumps(name)}: {json.dumps(one)}" for name, one in kept.items())
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(f"{{\n{lines}\n}}\n")


if __name__ == "__main__":
    main(sys.argv[1])
