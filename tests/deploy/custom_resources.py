"""JSON schemas of the custom resources that the chart makes, as far as it uses them.

kubernetes-validate knows Kubernetes' own kinds only. Fields that are not named here are refused: a typing error must not
pass, and a new field must be looked up in the resource's own definition first.
"""

from __future__ import annotations

from typing import Any

STRING = {"type": "string", "minLength": 1}
WHOLE = {"type": "integer", "minimum": 0}
BOOLEAN = {"type": "boolean"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
LABELS = {"type": "object", "minProperties": 1, "additionalProperties": {"type": "string", "maxLength": 63}}


def _object(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list(items: dict[str, Any], **limits: int) -> dict[str, Any]:
    return {"type": "array", "items": items} | limits


SELECTOR = _object("matchLabels", matchLabels=LABELS)
METADATA = _object("name labels", name={"type": "string", "maxLength": 63}, labels=LABELS)
POLICY = _object("type value periodSeconds", type={"enum": ["Pods", "Percent"]}, value=WHOLE, periodSeconds=WHOLE)
SCALING = _object(stabilizationWindowSeconds=WHOLE, policies=_list(POLICY))

SPECS: dict[tuple[str, str], dict[str, Any]] = {
    ("monitoring.coreos.com/v1", "ServiceMonitor"): _object(
        "selector endpoints",
        jobLabel=STRING,
        selector=SELECTOR,
        endpoints=_list(
            _object(
                "port",
                port=STRING,
                path=STRING,
                interval={"type": "string", "pattern": "^[0-9]+(ms|s|m)$"},
                scheme={"enum": ["http", "https"]},
                tlsConfig=_object(insecureSkipVerify=BOOLEAN),
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): _object(
        "groups",
        groups=_list(
            _object(
                "name rules",
                name=STRING,
                rules=_list(
                    _object(
                        "alert expr",
                        alert=STRING,
                        expr=STRING,
                        labels=LABELS,
                        annotations={"type": "object"},
                        **{"for": {"type": "string", "pattern": "^[0-9]+(s|m|h)$"}},
                    )
                ),
            )
        ),
    ),
    ("keda.sh/v1alpha1", "ScaledObject"): _object(
        "scaleTargetRef triggers",
        scaleTargetRef=_object("name", name=STRING),
        minReplicaCount=WHOLE,
        maxReplicaCount=WHOLE,
        pollingInterval=WHOLE,
        cooldownPeriod=WHOLE,
        advanced=_object(
            horizontalPodAutoscalerConfig=_object(behavior=_object(scaleUp=SCALING, scaleDown=SCALING)),
        ),
        triggers=_list(
            _object(
                "type metadata",
                type={"const": "prometheus"},
                metadata=_object("serverAddress query threshold", serverAddress=STRING, query=STRING, threshold=STRING),
            ),
            minItems=1,
        ),
    ),
    ("inference.networking.k8s.io/v1", "InferencePool"): _object(
        "selector targetPorts endpointPickerRef",
        selector=SELECTOR,
        targetPorts=_list(_object("number", number=PORT), minItems=1),
        endpointPickerRef=_object(
            "name port",
            name=STRING,
            port=_object("number", number=PORT),
            failureMode={"enum": ["FailOpen", "FailClose"]},
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): _object(
        "parentRefs rules",
        parentRefs=_list(_object("name", name=STRING)),
        rules=_list(
            _object(
                "backendRefs",
                matches=_list(_object(path=_object("type value", type={"const": "PathPrefix"}, value=STRING))),
                backendRefs=_list(_object("name", group=STRING, kind=STRING, name=STRING, port=PORT)),
                timeouts=_object(request={"type": "string", "pattern": "^([0-9]{1,5}(h|m|s|ms)){1,4}$"}),
            )
        ),
    ),
}


def schema(api_version: str, kind: str) -> dict[str, Any]:
    """The schema of one whole object. Raises KeyError for a kind that the chart does not make."""
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=METADATA,
        spec=SPECS[api_version, kind],
    )
