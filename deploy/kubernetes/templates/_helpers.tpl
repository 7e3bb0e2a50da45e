{{- define "nf4.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 52 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 52 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "nf4.selector" -}}
app.kubernetes.io/name: {{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "nf4.labels" -}}
{{ include "nf4.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "nf4.image" -}}
{{- $suffix := ternary "" "-cpu" (gt (int .Values.gpu.count) 0) -}}
{{ .Values.image.repository }}:{{ default (printf "%s%s" .Chart.AppVersion $suffix) .Values.image.tag }}
{{- end -}}

{{/* config.yaml: the chart's own settings over .Values.config, which may not say the same things otherwise. */}}
{{- define "nf4.config" -}}
{{- $given := deepCopy .Values.config -}}
{{- range $key := list "model" "served_model_name" "cache_dir" -}}
{{- if hasKey $given $key -}}
{{- fail (printf "config.%s: the chart sets it; use model, servedModelName or persistence" $key) -}}
{{- end -}}
{{- end -}}
{{- $http := default dict (get $given "http") -}}
{{- range $key := list "host" "port" "drain_timeout_s" "api_keys" "api_keys_file" "tls_cert_file" "tls_key_file" "metrics_names" -}}
{{- if hasKey $http $key -}}
{{- fail (printf "config.http.%s: the chart sets it; use drainTimeoutSeconds, apiKeys, tls or metrics.names" $key) -}}
{{- end -}}
{{- end -}}
{{- $ours := dict "drain_timeout_s" .Values.drainTimeoutSeconds "metrics_names" .Values.metrics.names -}}
{{- if .Values.apiKeys.existingSecret -}}
{{- $_ := set $ours "api_keys_file" (printf "/etc/nf4/keys/%s" .Values.apiKeys.key) -}}
{{- end -}}
{{- if .Values.tls.existingSecret -}}
{{- $_ := set $ours "tls_cert_file" "/etc/nf4/tls/tls.crt" -}}
{{- $_ := set $ours "tls_key_file" "/etc/nf4/tls/tls.key" -}}
{{- end -}}
{{- $document := dict "model" .Values.model "log_format" "json" -}}
{{- if .Values.servedModelName -}}
{{- $_ := set $document "served_model_name" .Values.servedModelName -}}
{{- end -}}
{{- $document = merge $document $given -}}
{{- if hasKey $given "log_format" -}}
{{- $_ := set $document "log_format" (get $given "log_format") -}}
{{- end -}}
{{- $_ := set $document "http" (merge $ours $http) -}}
{{- toYaml $document -}}
{{- end -}}

{{- define "nf4.scheme" -}}
{{- ternary "HTTPS" "HTTP" (ne .Values.tls.existingSecret "") -}}
{{- end -}}

{{/* The most replicas that there can be at a time. */}}
{{- define "nf4.mostReplicas" -}}
{{- $replicas := ternary (int .Values.replicas) (int .Values.autoscaling.maxReplicas) (eq .Values.autoscaling.kind "none") -}}
{{- $surge := .Values.rollingUpdate.maxSurge | toString -}}
{{- ternary $replicas (add $replicas 1) (has $surge (list "0" "0%")) -}}
{{- end -}}
