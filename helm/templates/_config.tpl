{{/*
The configuration as the pods get it: values.config, and what only the chart knows. Without num_threads an engine would
start a thread per core of the node, whatever the pod's CPU limit: the smallest limit of the pods that hold the device,
shared by the devices of such a pod. The pods that hold a device are marked by a custom resource of Ray.
*/}}
{{- define "remora.document" -}}
{{- $config := deepCopy .Values.config -}}
{{- $workers := .Values.workers -}}
{{- $devices := list -}}
{{- range $device := $config.devices -}}
{{- $device = set (deepCopy $device) "node_resource" (include "remora.deviceResource" $device.name) -}}
{{- if not $device.num_threads -}}
{{- $threads := 0 -}}
{{- range $workers -}}
{{- if has $device.name .devices -}}
{{- $own := max 1 (div (include "remora.cores" .resources.limits.cpu | int64) (len .devices)) -}}
{{- $threads = ternary $own (min $threads $own) (eq (int64 $threads) 0) -}}
{{- end -}}
{{- end -}}
{{- if $threads -}}
{{- $device = set $device "num_threads" $threads -}}
{{- end -}}
{{- end -}}
{{- $devices = append $devices $device -}}
{{- end -}}
{{- $config = set $config "devices" $devices -}}
{{- if .Values.collector.enabled -}}
{{- $telemetry := dict "otlp_endpoint" "http://127.0.0.1:4317" "otlp_protocol" "grpc" -}}
{{- $config = set $config "telemetry" (mergeOverwrite (default dict $config.telemetry) $telemetry) -}}
{{- end -}}
{{- if include "remora.hasTenants" . -}}
{{- $config = set (omit $config "tenants") "tenants_file" "/etc/remora-tenants/tenants.yaml" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{/* Tenants are kept in a Secret, not in the ConfigMap: whose they are and what they may do is nobody's business. */}}
{{- define "remora.hasTenants" -}}
{{- if or .Values.config.tenants .Values.tenants.existingSecret -}}
true
{{- end -}}
{{- end -}}

{{/* Exactly the text whose digest is in the Serve configuration: no newline at the end. */}}
{{- define "remora.tenants" -}}
{{- toYaml .Values.config.tenants -}}
{{- end -}}

{{- define "remora.tenantsSecret" -}}
{{- default (printf "%s-tenants" (include "remora.fullname" .)) .Values.tenants.existingSecret -}}
{{- end -}}

{{/* Variable with an operator's key, for what asks the platform; nothing without one. */}}
{{- define "remora.operatorKeyEnv" -}}
{{- with .Values.operatorKey.existingSecret }}
- name: REMORA_API_KEY
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: {{ $.Values.operatorKey.key | quote }}}}
{{- end }}
{{- end -}}

{{/* What pools read once, when they are created: only new pods take another value of it. */}}
{{- define "remora.poolDigest" -}}
{{- $devices := (include "remora.document" . | fromYaml).devices -}}
{{- dict "cluster" .Values.config.cluster "devices" $devices | toJson | sha256sum -}}
{{- end -}}

{{- define "remora.stateDir" -}}
{{- default "/var/lib/remora" .Values.config.cluster.state_dir -}}
{{- end -}}

{{/* Custom Ray resource that marks the nodes of a device. */}}
{{- define "remora.deviceResource" -}}
remora_device_{{ . }}
{{- end -}}

{{- define "remora.serveConfig" -}}
{{- $document := include "remora.document" . -}}
proxy_location: EveryNode
http_options:
  host: {{ .Values.config.http.host | quote }}
  port: {{ int .Values.config.http.port }}
logging_config:
  log_level: WARNING
  enable_access_log: false
applications:
  - name: remora
    route_prefix: /
    import_path: remora.platform.cluster_app:cluster_app
    external_scaler_enabled: true
    args:
      config: /etc/remora/remora.yaml
      # Changes with the configuration, so that Serve rolls the replicas over in place.
      sha256: {{ sha256sum $document }}
      {{- if .Values.config.tenants }}
      tenants_sha256: {{ include "remora.tenants" . | sha256sum }}
      {{- end }}
{{- end -}}
