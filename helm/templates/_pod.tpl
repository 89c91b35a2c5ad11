{{/* Variables of every Ray container; platform/base/serve_environment.py says why. Head and workers need the same. */}}
{{- define "remora.env" -}}
{{- $env := dict
  "HOME" "/home/remora"
  "TMPDIR" "/tmp"
  "HF_HOME" "/models/huggingface"
  "REMORA_STATE_DIR" (include "remora.stateDir" .)
  "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO" "0"
  "RAY_DEDUP_LOGS" "0"
  "RAY_USAGE_STATS_ENABLED" "0"
  "RAY_SERVE_THROUGHPUT_OPTIMIZED" "1"
  "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S" "1"
  "RAY_SERVE_QUEUE_LENGTH_CACHE_TIMEOUT_S" "86400"
  "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S" "60"
  "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S" "30"
  "RAY_SERVE_PORT_QUARANTINE_S" "5"
  "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS" "5000"
  "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S" "300"
  "RAY_SERVE_ENABLE_HA_PROXY" "1"
  "RAY_SERVE_HAPROXY_BINARY_PATH" "/tmp/remora/haproxy/haproxy"
  "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC" "/tmp/remora/haproxy/c"
  "RAY_SERVE_HAPROXY_SOCKET_PATH" "/tmp/remora/haproxy/s"
  "RAY_SERVE_HAPROXY_SERVER_STATE_BASE" "/tmp/remora/haproxy"
  "RAY_SERVE_HAPROXY_SERVER_STATE_FILE" "/tmp/remora/haproxy/state"
  "RAY_SERVE_HAPROXY_METRICS_ENABLED" "0"
  "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH" "/tmp/remora/haproxy/m"
  "RAY_SERVE_HAPROXY_NBTHREAD" "1"
-}}
- name: POD_NAME
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- range $name, $value := mergeOverwrite $env (deepCopy .Values.env) }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- with .Values.database }}
{{- if .existingSecret }}
- name: REMORA_DATABASE_URL
  valueFrom: {secretKeyRef: {name: {{ .existingSecret | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end }}
{{- include "remora.secretEnv" .Values.secretEnv }}
{{- end -}}

{{- define "remora.secretEnv" -}}
{{- range . }}
- name: {{ .name }}
  valueFrom: {secretKeyRef: {name: {{ .secret | quote }}, key: {{ .key | quote }}}}
{{- end }}
{{- end -}}

{{- define "remora.containerSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities: {drop: [ALL]}
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "remora.podSecurityContext" -}}
runAsNonRoot: true
runAsUser: {{ int64 .Values.securityContext.runAsUser }}
runAsGroup: {{ int64 .Values.securityContext.runAsGroup }}
fsGroup: {{ int64 .Values.securityContext.fsGroup }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{/* A volume of a dict {root, name, storage}: emptyDir, ephemeralClaim (one a pod), claim (one for all). */}}
{{- define "remora.storage" -}}
- name: {{ .name }}
{{- if eq .storage.type "claim" }}
  persistentVolumeClaim:
    claimName: {{ default (printf "%s-%s" (include "remora.fullname" .root) .name) .storage.existingClaim }}
{{- else if eq .storage.type "ephemeralClaim" }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [ReadWriteOnce]
        {{- with .storage.storageClassName }}
        storageClassName: {{ . }}
        {{- end }}
        resources: {requests: {storage: {{ .storage.size }}}}
{{- else }}
  emptyDir: {sizeLimit: {{ .storage.size }}}
{{- end }}
{{- end -}}

{{- define "remora.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: home, mountPath: /home/remora}
- {name: shared-mem, mountPath: /dev/shm}
# A whole folder: a file mounted by subPath would never follow a change.
- {name: config, mountPath: /etc/remora, readOnly: true}
{{- if include "remora.hasTenants" . }}
- {name: tenants, mountPath: /etc/remora-tenants, readOnly: true}
{{- end }}
- {name: models, mountPath: /models}
- name: state
  mountPath: {{ include "remora.stateDir" . }}
  {{- if eq .Values.state.type "claim" }}
  # Process ids are part of file names and repeat from pod to pod.
  subPathExpr: $(POD_NAME)
  {{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/*
Pod spec of a dict {root, group, component, ports}. `group` is .Values.head or one of .Values.workers.
KubeRay takes the first container as Ray's.
*/}}
{{- define "remora.podSpec" -}}
{{- $root := .root -}}
{{- $group := .group -}}
{{- $image := include "remora.image" (dict "root" $root "image" $group.image) -}}
{{- $shm := include "remora.shmBytes" (dict "root" $root "devices" (default list $group.devices)) -}}
{{- $gpu := default (dict "count" 0) $group.gpu -}}
serviceAccountName: {{ include "remora.serviceAccountName" $root }}
# Only Ray's autoscaler, in the head, speaks to the Kubernetes API.
automountServiceAccountToken: {{ and (eq .component "head") $root.Values.ray.autoscaling.enabled }}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ int $root.Values.terminationGracePeriodSeconds }}
securityContext:
  {{- include "remora.podSecurityContext" $root | nindent 2 }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- if and (int $gpu.count) (ne (default "nvidia" $gpu.runtimeClassName) "none") }}
runtimeClassName: {{ default "nvidia" $gpu.runtimeClassName }}
{{- end }}
{{- with $group.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $group.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $group.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
initContainers:
  # Serve starts HAProxy by this program, which keeps it from opening pages for everybody.
  - name: haproxy-files
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    command:
      - python
      - -c
      - |
        from pathlib import Path
        from remora.platform.base.serve_environment import write_haproxy_wrapper
        write_haproxy_wrapper(Path("/tmp/remora/haproxy"))
    securityContext:
      {{- include "remora.containerSecurityContext" $root | nindent 6 }}
    resources:
      requests: {cpu: 100m, memory: 256Mi}
      limits: {cpu: "1", memory: 512Mi}
    volumeMounts:
      - {name: tmp, mountPath: /tmp}
containers:
  - name: ray-{{ .component }}
    image: {{ $image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    env:
      {{- include "remora.env" $root | nindent 6 }}
    ports:
      {{- .ports | nindent 6 }}
    securityContext:
      {{- include "remora.containerSecurityContext" $root | nindent 6 }}
    resources:
      requests:
        {{- toYaml $group.resources.requests | nindent 8 }}
        {{- if int $gpu.count }}
        {{ default "nvidia.com/gpu" $gpu.resourceName }}: {{ int $gpu.count }}
        {{- end }}
      limits:
        {{- toYaml $group.resources.limits | nindent 8 }}
        {{- if int $gpu.count }}
        {{ default "nvidia.com/gpu" $gpu.resourceName }}: {{ int $gpu.count }}
        {{- end }}
    # Raylet, and on the head the GCS. Whether replicas get on is Serve's affair, which replaces them one by one.
    startupProbe:
      httpGet: {path: /api/healthz, port: agent}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: {{ int $root.Values.probes.startupFailureThreshold }}
    livenessProbe:
      httpGet: {path: /api/healthz, port: agent}
      periodSeconds: 10
      timeoutSeconds: 10
      failureThreshold: 12
    readinessProbe:
      {{- if eq .component "head" }}
      # KubeRay hands the Serve configuration to a head that is ready: its readiness must not depend on Serve.
      httpGet: {path: /api/healthz, port: agent}
      {{- else }}
      httpGet: {path: {{ $root.Values.probes.readinessPath }}, port: serve}
      {{- end }}
      periodSeconds: 5
      timeoutSeconds: 5
      failureThreshold: 2
    lifecycle:
      # New connections go elsewhere before Ray ends.
      preStop: {exec: {command: [/bin/sh, -c, sleep 5; ray stop]}}
    volumeMounts:
      {{- include "remora.volumeMounts" $root | nindent 6 }}
  {{- if $root.Values.collector.enabled }}
  - name: collector
    image: {{ $root.Values.collector.image }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: [--config=/etc/collector/config.yaml]
    {{- with $root.Values.collector.secretEnv }}
    env:
      {{- include "remora.secretEnv" . | nindent 6 }}
    {{- end }}
    securityContext:
      {{- include "remora.containerSecurityContext" $root | nindent 6 }}
    resources:
      {{- toYaml $root.Values.collector.resources | nindent 6 }}
    ports:
      - {name: collector, containerPort: 13133}
    livenessProbe:
      httpGet: {path: /, port: collector}
      periodSeconds: 20
    readinessProbe:
      httpGet: {path: /, port: collector}
      periodSeconds: 10
    volumeMounts:
      - {name: collector, mountPath: /etc/collector, readOnly: true}
  {{- end }}
volumes:
  - {name: tmp, emptyDir: {sizeLimit: {{ $root.Values.tmpSizeLimit }}}}
  - {name: home, emptyDir: {sizeLimit: 1Gi}}
  # Arenas, their journals and Ray's object store. Its pages count as memory of the pod.
  - {name: shared-mem, emptyDir: {medium: Memory, sizeLimit: "{{ $shm }}"}}
  - {name: config, configMap: {name: {{ include "remora.fullname" $root }}-config}}
  {{- if include "remora.hasTenants" $root }}
  - name: tenants
    secret:
      secretName: {{ include "remora.tenantsSecret" $root | quote }}
      items: [{key: {{ $root.Values.tenants.key | quote }}, path: tenants.yaml}]
  {{- end }}
  {{- include "remora.storage" (dict "root" $root "name" "state" "storage" $root.Values.state) | nindent 2 }}
  {{- include "remora.storage" (dict "root" $root "name" "models" "storage" $root.Values.models) | nindent 2 }}
  {{- if $root.Values.collector.enabled }}
  - {name: collector, configMap: {name: {{ include "remora.fullname" $root }}-collector}}
  {{- end }}
  {{- with $root.Values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}
