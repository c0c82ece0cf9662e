package main

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
)

// checkManifests renders the chart of a directory and judges it.
func checkManifests(t *testing.T, args ...string) (string, error) {
	t.Helper()
	testenv.Need(t, testenv.Kubernetes)
	out, err := exec.Command(filepath.Join(testenv.Root(), ".build/bin/check-kubernetes"), args...).CombinedOutput()
	return string(out), err
}

// The chart's objects are ones that Kubernetes takes, fit together, and are the plain manifests; the host takes the
// configuration in them.
func TestManifests(t *testing.T) {
	config, err := checkManifests(t, "-config", "kubernetes")
	if err != nil {
		t.Fatalf("read the configuration: %v\n%s", err, config)
	}
	file := filepath.Join(t.TempDir(), "kvhost.toml")
	write(t, file, config, 0o600)
	out, err := exec.Command(binary(t), "config", "--config", file).CombinedOutput()
	if err != nil || !strings.Contains(string(out), `path = "/var/lib/kvhost/kv"`) {
		t.Errorf("kvhost config: %v, want the root /var/lib/kvhost/kv in\n%s", err, out)
	}
}

// What is wrong with a chart is found.
func TestManifestsAreJudged(t *testing.T) {
	const daemon, engine, policy, pod, monitor, peers = "daemonset.yaml", "vllm.yaml", "networkpolicy.yaml", "_helpers.tpl", "podmonitor.yaml",
		"peers.yaml"
	for _, c := range []struct{ file, from, to, says string }{
		{pod, "hostIPC: true", "hostIpc: true", "hostIpc"},
		{pod, "hostIPC: true", "hostIPC: 1", "hostIPC"},
		{pod, "hostPID: true", "hostPID: false", "CUDA IPC does not work"},
		{daemon, "{name: udev, mountPath: /run/udev", "{name: dev, mountPath: /run/udev", "which is no volume"},
		{daemon, "path: /readyz, port: http", "path: /readyz, port: web", "no readiness probe"},
		{daemon, "drop: [ALL]}\n          volumeMounts:\n            - {name: config", "drop: [NET_RAW]}\n          volumeMounts:\n            - {name: config",
			"without capabilities"},
		{daemon, `configMap: {name: {{ include "kvhost.name" . }}}`, "configMap: {name: other}", "the ConfigMap other"},
		{engine, "hostPath: {path: {{ .Values.run | quote }}", "hostPath: {path: /run/other", "directory for the socket"},
		{engine, "      labels:\n{{ include \"kvhost.labels\" $part", "      labels:\n{{ include \"kvhost.labels\" (dict \"part\" \"llm\" \"top\" .)", "does not match its own pods"},
		{policy, "port: http", "port: metrics", "which the host lacks"},
		{policy, "{{- fail", "{{- print", "[otlp]"},
		{policy, "{{- if or .egress $.Values.peers.secret }}\n  egress:", "{{- if true }}\n  egress: []", "an empty list"},
		{monitor, "port: http", "port: web", "does not select the host's metrics"},
		{peers, "clusterIP: None", "clusterIP: 10.0.0.1", "does not lead to the hosts"},
		{peers, "targetPort: peers", "targetPort: peer", "does not lead to the hosts"},
		{peers, "targetPort: peers", "targetPort: http", "keeps peers apart"},
		{daemon, "}}.svc:9477", "}}.svc:9476", "does not lead to the hosts"},
		{daemon, "secretName: {{ .Values.peers.secret | quote }}", "secret: a", "unknown field"},
		{policy, "{protocol: TCP, port: peers}\n{{- end }}\n{{- if or", "{protocol: TCP, port: http}\n{{- end }}\n{{- if or", "to the host false"},
		{policy, "    - to:", "    - from:", "unknown field"},
		{policy, "port: 53", "port: 54", "names false"},
		{engine, "targetPort: api", "targetPort: http", "does not lead to the engine"},
		{pod, "app.kubernetes.io/instance: {{ .top.Release.Name | quote }}", "app.kubernetes.io/instance: one", "two releases"},
		{pod, `replace "." "-"`, "lower", "cannot have the name"},
		{pod, `"r%s"`, `"%s"`, "cannot have the name"},
		{pod, ".top.Release.Name | quote", ".top.Release.Name", "cannot unmarshal number"},
		{engine, "{{ int64 .Values.vllm.gpus }}", "{{ .Values.vllm.gpus }}", "or as 2e+06"},
		{daemon, "secretName: {{ .Values.peers.secret | quote }}", "secretName: {{ .Values.peers.secret }}", "cannot unmarshal number"},
		{"../values.schema.json", `"minimum": 0}`, `"minimum": "0"}`, "schema"},
		{policy, "kind: NetworkPolicy", "kind: NetworkPolicies", "unexpected kind"},
		{daemon, "periodSeconds: 2", "periodSeconds: 3", "is not what the chart gives"},
	} {
		dir := t.TempDir()
		testenv.OK(t, os.CopyFS(dir, os.DirFS("kubernetes")))
		name := filepath.Join(dir, "chart/templates", c.file)
		text := read(t, name)
		changed := strings.Replace(text, c.from, c.to, 1)
		if changed == text {
			t.Fatalf("%s has no %q", c.file, c.from)
		}
		write(t, name, changed, 0o600)
		if out, err := checkManifests(t, dir); err == nil || !strings.Contains(out, c.says) {
			t.Errorf("check %s with %s: %v, want %q in\n%s", c.file, c.to, err, c.says, out)
		}
	}
}
