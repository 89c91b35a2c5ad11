{{/* What a schema cannot say. Every message names the value and what to do. */}}
{{- define "remora.validate" -}}
{{- $root := . -}}
{{- $config := .Values.config -}}
{{- if regexMatch "^(localhost|127\\..*|::1)$" $config.http.host -}}
{{- fail (printf "config.http.host: nobody outside of the pod reaches %q; write 0.0.0.0" $config.http.host) -}}
{{- end -}}
{{- $port := int $config.http.port -}}
{{- if or (has $port (list 6379 8080 8265 10001 52365)) (and (ge $port 30000) (le $port 31000)) (and (ge $port 40000) (le $port 41000)) -}}
{{- fail (printf "config.http.port: %d is a port of Ray in the same pod; take another, such as 8000" $port) -}}
{{- end -}}
{{- if and .Values.config.tenants .Values.tenants.existingSecret -}}
{{- fail "tenants.existingSecret: not allowed beside config.tenants; give one of them" -}}
{{- end -}}
{{- if and .Values.config.tenants (ne .Values.tenants.key "tenants.yaml") -}}
{{- fail "tenants.key: is only for tenants.existingSecret" -}}
{{- end -}}
{{- if and .Values.database.existingSecret $config.cluster.database_url -}}
{{- fail "database.existingSecret: not allowed beside config.cluster.database_url; give one of them" -}}
{{- end -}}
{{- if not (or $config.http.trusted_network (include "remora.hasTenants" .)) -}}
{{- fail "config.http.trusted_network: without tenants whoever reaches the port may do everything; configure tenants, or say true if access is controlled outside" -}}
{{- end -}}
{{- if and (include "remora.hasTenants" .) .Values.monitoring.serviceMonitor (not .Values.operatorKey.existingSecret) -}}
{{- fail "operatorKey.existingSecret: is needed with tenants and monitoring.serviceMonitor: /metrics asks for an operator's key" -}}
{{- end -}}
{{- $kinds := dict -}}
{{- range $config.devices -}}
{{- if .node_resource -}}
{{- fail (printf "config.devices: node_resource of %q: the chart says which pods hold a device; leave it out" .name) -}}
{{- end -}}
{{- $_ := set $kinds .name (default "cpu" .kind) -}}
{{- end -}}
{{- $offered := list -}}
{{- $groups := list -}}
{{- range $worker := .Values.workers -}}
{{- if has $worker.name $groups -}}
{{- fail (printf "workers: the name %q is used twice" $worker.name) -}}
{{- end -}}
{{- $groups = append $groups $worker.name -}}
{{- $cuda := 0 -}}
{{- range $worker.devices -}}
{{- if not (hasKey $kinds .) -}}
{{- fail (printf "workers.%s.devices: no device %q in config.devices; one of %s" $worker.name . (keys $kinds | sortAlpha | join ", ")) -}}
{{- end -}}
{{- if eq (get $kinds .) "cuda" -}}
{{- $cuda = add $cuda 1 -}}
{{- end -}}
{{- $offered = append $offered . -}}
{{- end -}}
{{- $gpus := 0 -}}
{{- with $worker.gpu -}}
{{- $gpus = int .count -}}
{{- end -}}
{{- if ne (int $cuda) (int $gpus) -}}
{{- fail (printf "workers.%s.gpu.count: is %d, but the group holds %d devices of kind cuda; each takes one GPU" $worker.name (int $gpus) (int $cuda)) -}}
{{- end -}}
{{- $shm := include "remora.shmBytes" (dict "root" $root "devices" $worker.devices) | int64 -}}
{{- if le (include "remora.quantityBytes" $worker.resources.limits.memory | int64) $shm -}}
{{- fail (printf "workers.%s.resources.limits.memory: %s do not hold the %d MiB of arenas and object store in /dev/shm, which count as the pod's memory, and weights beside them" $worker.name $worker.resources.limits.memory (div $shm 1048576)) -}}
{{- end -}}
{{- if $root.Values.ray.autoscaling.enabled -}}
{{- if not $worker.replicasPerNode -}}
{{- fail (printf "workers.%s.replicasPerNode: is needed with ray.autoscaling.enabled: a node that takes any number of replicas is never full" $worker.name) -}}
{{- end -}}
{{- $least := int (default 0 $worker.minReplicas) -}}
{{- $most := int (default $worker.replicas $worker.maxReplicas) -}}
{{- if or (gt $least (int $worker.replicas)) (lt $most (int $worker.replicas)) -}}
{{- fail (printf "workers.%s.replicas: %d is not between minReplicas (%d) and maxReplicas (%d)" $worker.name (int $worker.replicas) $least $most) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $config.models -}}
{{- $device := default "cpu0" .device -}}
{{- $model := . -}}
{{- range default (list $device) .stage_devices -}}
{{- if not (has . $offered) -}}
{{- fail (printf "workers: no group holds the device %q of the model %q" . $model.name) -}}
{{- end -}}
{{- end -}}
{{- range $worker := $root.Values.workers -}}
{{- if has $device $worker.devices -}}
{{- range default (list) $model.more_devices -}}
{{- if not (has . $worker.devices) -}}
{{- fail (printf "workers.%s.devices: holds %q of the model %q, but not %q, where its replicas would be as well" $worker.name $device $model.name .) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and .Values.collector.enabled (dig "telemetry" "otlp_endpoint" "" $config) -}}
{{- fail "config.telemetry.otlp_endpoint: with collector.enabled spans go to the collector beside each process; name your endpoint in collector.exporters" -}}
{{- end -}}
{{- end -}}
