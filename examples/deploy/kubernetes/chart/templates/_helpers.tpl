{{/* The name of the host's objects: the release's, with kvhost in it. A Service's has no dots, and begins with a letter. */}}
{{- define "kvhost.name" -}}
{{- $release := .Release.Name | replace "." "-" | trunc 43 | trimSuffix "-" }}
{{- if not (contains "kvhost" $release) }}{{ $release = printf "%s-kvhost" $release }}{{ end }}
{{- if regexMatch "^[0-9]" $release }}{{ $release = printf "r%s" $release }}{{ end }}
{{- $release }}
{{- end }}

{{/* By which objects select pods: of the host, or of vLLM. */}}
{{- define "kvhost.selector" -}}
app.kubernetes.io/name: {{ .part }}
app.kubernetes.io/instance: {{ .top.Release.Name | quote }}
{{- end }}

{{- define "kvhost.labels" -}}
{{ include "kvhost.selector" . }}
app.kubernetes.io/version: {{ .top.Chart.AppVersion | quote }}
{{- end }}

{{/* What pods that share GPU memory have in common: the node's IPC and PID namespaces, GPUs, and where they run. */}}
{{- define "kvhost.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
# CUDA IPC between engines and the host.
hostIPC: true
hostPID: true
{{- with .Values.runtimeClass }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity:
{{ toYaml . | indent 2 }}
{{- end }}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- end }}
