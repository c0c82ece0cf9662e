{{- define "kvhost.labels" -}}
{app.kubernetes.io/name: kvhost, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}
{{- define "kvhost.vllm.labels" -}}
{app.kubernetes.io/name: vllm, app.kubernetes.io/instance: {{ .Release.Name }}}
{{- end }}
{{- define "kvhost.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
# CUDA IPC between engines and the host.
hostIPC: true
hostPID: true
{{- with .Values.runtimeClass }}
runtimeClassName: {{ . }}
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
{{- end }}
