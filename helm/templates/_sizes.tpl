{{/* Bytes of a size as the configuration writes it: a number, or text such as 512MiB or 1.5GB. */}}
{{- define "remora.bytes" -}}
{{- if kindIs "string" . -}}
{{- $text := . | trim | lower -}}
{{- $number := regexFind "^[0-9]*\\.?[0-9]+" $text -}}
{{- $unit := trimPrefix $number $text | trim | default "b" -}}
{{- $powers := dict "k" 1 "m" 2 "g" 3 "t" 4 "p" 5 "e" 6 -}}
{{- $bytes := $number -}}
{{- if and $number (regexMatch "^(b|[kmgtpe](i?b)?)$" $unit) -}}
{{- if ne $unit "b" -}}
{{- $base := ternary 1024 1000 (contains "i" $unit) -}}
{{- range until (int (get $powers (substr 0 1 $unit))) -}}
{{- $bytes = mulf $bytes $base -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- fail (printf "%q is not a size: write bytes, or a number with kB, MB, GB, TB, KiB, MiB, GiB or TiB" .) -}}
{{- end -}}
{{- $bytes | float64 | floor | int64 -}}
{{- else -}}
{{- . | int64 -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a Kubernetes quantity: 8Gi, 500M, 1073741824. */}}
{{- define "remora.quantityBytes" -}}
{{- $text := . | toString -}}
{{- $number := regexFind "^[0-9]+(\\.[0-9]+)?" $text -}}
{{- $suffix := trimPrefix $number $text -}}
{{- if not (and $number (regexMatch "^([KMGTPE]i|[kMGTPE])?$" $suffix)) -}}
{{- fail (printf "%q is not a quantity of memory: write 8Gi, 500M or bytes" $text) -}}
{{- end -}}
{{- if $suffix -}}
{{- include "remora.bytes" (printf "%s%s" $number (ternary $suffix (printf "%sB" $suffix) (hasSuffix "i" $suffix) | replace "i" "iB")) -}}
{{- else -}}
{{- include "remora.bytes" $number -}}
{{- end -}}
{{- end -}}

{{/* Whole cores of a Kubernetes quantity, at least one: "4", 3500m, 2.5. */}}
{{- define "remora.cores" -}}
{{- $text := . | toString -}}
{{- if hasSuffix "m" $text -}}
{{- max 1 (div (trimSuffix "m" $text | int64) 1000) -}}
{{- else -}}
{{- max 1 ($text | float64 | floor | int64) -}}
{{- end -}}
{{- end -}}

{{/*
Size of /dev/shm of a dict {root, devices}: arenas with their journals (platform code: PoolSettings.journal_spare_bytes),
Ray's object store, and 64 MiB for headers and whatever else is put there. A CUDA arena leaves only its journal there.
*/}}
{{- define "remora.shmBytes" -}}
{{- $MiB := 1048576 -}}
{{- $sum := add (include "remora.bytes" .root.Values.config.cluster.object_store_bytes | int64) (mul 64 $MiB) -}}
{{- $names := .devices -}}
{{- range .root.Values.config.devices -}}
{{- if has .name $names -}}
{{- $arena := include "remora.bytes" .arena_bytes | int64 -}}
{{- $sum = add $sum (max (mul 16 $MiB) (div $arena 64)) -}}
{{- if ne (default "cpu" .kind) "cuda" -}}
{{- $sum = add $sum $arena (mul 2 $MiB) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- mul (div (add $sum $MiB -1) $MiB) $MiB -}}
{{- end -}}
