//go:build ignore

// Package check renders the Helm chart and judges it: every object is decoded strictly into the types of Kubernetes, the
// parts of each fit together, and the plain manifests are what the chart gives with its defaults. It has tests alone, which
// `make .build/bin/check-kubernetes` compiles with the requirements of check.mod, so that kvhost does not depend on
// Kubernetes. TestManifests of examples/deploy runs them.
//
//	check-kubernetes [-update] [-config] DIRECTORY   # which has chart/, kvhost.yaml and vllm.yaml
package check

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const head = "# kubectl create namespace kvhost && kubectl apply -n kvhost -f this file. It is what the chart gives with its defaults\n" +
	"# (and vllm.enabled=true for vllm.yaml): `make manifests` writes it.\n"

// good are values files that the chart takes. Every text and number in them stands in an object as it is.
var good = map[string]string{
	"plain":      "vllm: {enabled: true}", // of the plain manifests
	"no class":   `{runtimeClass: "", nodeSelector: null, tolerations: null}`,
	"other user": "{user: 1, state: /data, run: /data/run, vllm: {enabled: true}}",
	"all": `
imagePullSecrets: [{name: login}]
affinity: {nodeAffinity: {}}
priorityClassName: high
podAnnotations: {a: b}
env: [{name: A, value: b}]
volumes: [{name: tokens, secret: {secretName: tokens}}]
volumeMounts: [{name: tokens, mountPath: /etc/tokens}]
config: |
  [otlp]
  endpoint = "http://collector:4318"
  [[root]]
  path = "/var/lib/kvhost/kv"
networkPolicy: {egress: [{ports: [{protocol: TCP, port: 4318}]}]}
podMonitor: {enabled: true, labels: {release: prometheus}}
vllm: {enabled: true, args: [--seed=1], env: [{name: B, value: c}], hfTokenSecret: hf}`,
	"peers":     "{peers: {secret: kvhost-peers}, vllm: {enabled: true}}",
	"no policy": "{networkPolicy: {enabled: false}, vllm: {enabled: true, service: false}}",
	// What YAML takes for a number, a boolean, nothing, a comment, a mapping or a list, where nothing quotes it.
	"texts": `
image: "1e3"
imagePullSecrets: [{name: "123"}]
state: "/data,1/}"
run: "/run]/&a"
user: 2147483647
runtimeClass: "0x1f"
nodeSelector: {"1": "true"}
tolerations: [{key: "2", operator: Equal, value: "no", tolerationSeconds: 3000000}]
priorityClassName: "null"
podAnnotations: {a: "1e9"}
env: [{name: "7", value: "1000000"}, {name: "8", value: "2026-11-28"}]
volumes: [{name: "9", secret: {secretName: "010", defaultMode: 288}}]
volumeMounts: [{name: "9", mountPath: "/1"}]
peers: {secret: "12e4"}
networkPolicy: {metricsFrom: {a: "on"}}
podMonitor: {enabled: true, labels: {b: "~"}}
vllm:
  enabled: true
  image: "true"
  model: "a: b #c"
  replicas: 1000000
  gpus: 2000000
  args: ["{}", "- 1"]
  env: [{name: C, value: "0.10"}]
  hfTokenSecret: "1_000"`,
}

// bad are values files that the chart refuses, and what it says.
var bad = map[string]string{
	"replicas":     "vllm: {replicas: abc}",
	"typo":         "typo: 1",
	"image":        `image: ""`,
	"state":        "state: relative",
	"user":         "user: 0",
	"metricsFrom":  "networkPolicy: {metricsFrom: {kubernetes.io/metadata.name: null}}",
	"config":       "config: socket = 1",
	"limits":       "resources: {limits: null}",
	"egress":       `config: "[otlp]\n[[root]]\n"`,
	"peers":        "peers: {secret: 1}",
	"/env/0/value": "env: [{name: A, value: 1}]",
}

// releases are names and namespaces that helm takes.
var releases = [][2]string{{"kvhost", "kvhost"}, {"1.blue", "kvhost"}, {"123", "1e3"}}

func TestMain(*testing.M) {
	update := flag.Bool("update", false, "write the plain manifests")
	config := flag.Bool("config", false, "print the host's configuration")
	flag.Parse()
	if err := run(flag.Arg(0), *update, *config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func run(dir string, update, config bool) error {
	c, err := loader.Load(filepath.Join(dir, "chart"))
	if err != nil {
		return err
	}
	var errs []error
	for says, v := range bad {
		if _, err := render(c, releases[0], v); err == nil || !strings.Contains(err.Error(), says) {
			errs = append(errs, fmt.Errorf("values that are wrong, %v: %v, want an error about %s", v, err, says))
		}
	}
	for name, v := range good {
		seen := make([]*objects, len(releases))
		for i, release := range releases {
			files, err := render(c, release, v)
			if err != nil {
				return fmt.Errorf("%s, as %s: %w", name, release, err)
			}
			o, err := decode(files)
			if err == nil {
				seen[i], err = o, errors.Join(o.judge(), o.have(v, release))
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s, as %s: %w", name, release, err))
			}
			if name == "plain" && i == 0 {
				errs = append(errs, compare(dir, files, update))
				if config {
					fmt.Print(o.config.Data["kvhost.toml"])
				}
			}
		}
		if a, b := seen[0], seen[1]; a != nil && b != nil && (a.host.Name == b.host.Name || a.config.Name == b.config.Name ||
			selects(a.host.Spec.Selector, b.host.Spec.Template.Labels)) {
			errs = append(errs, fmt.Errorf("%s: two releases of a namespace have the same objects", name))
		}
	}
	files, err := render(c, releases[0], "")
	if files["vllm.yaml"] != "" {
		errs = append(errs, errors.New("the chart deploys vLLM without being asked"))
	}
	return errors.Join(append(errs, err)...)
}

// compare compares the plain manifests with those that were rendered, or writes them.
func compare(dir string, files map[string]string, update bool) error {
	var errs []error
	for file, text := range files {
		file = filepath.Join(dir, file)
		if update {
			errs = append(errs, os.WriteFile(file, []byte(text), 0o644))
		} else if plain, err := os.ReadFile(file); err != nil || string(plain) != text {
			errs = append(errs, fmt.Errorf("%s is not what the chart gives: make manifests (%v)", file, err))
		}
	}
	return errors.Join(errs...)
}

// render gives the manifests, vLLM's apart. It reads a values file as helm's -f does: numbers are float64.
func render(c *chart.Chart, release [2]string, file string) (map[string]string, error) {
	v := map[string]any{}
	if err := yaml.Unmarshal([]byte(file), &v); err != nil {
		return nil, err
	}
	top, err := chartutil.ToRenderValues(c, v, chartutil.ReleaseOptions{Name: release[0], Namespace: release[1]}, nil)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(c, top)
	if err != nil {
		return nil, err
	}
	var names []string
	for name, text := range rendered {
		if strings.TrimSpace(text) != "" && path.Ext(name) == ".yaml" {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	files := map[string]string{}
	for _, name := range names {
		file := "kvhost.yaml"
		if path.Base(name) == "vllm.yaml" {
			file = "vllm.yaml"
		}
		if files[file] == "" {
			files[file] = head
		}
		files[file] += "---\n" + strings.Trim(rendered[name], "\n") + "\n"
	}
	return files, nil
}

// objects are those of one rendering; nil: there is none.
type objects struct {
	host    *appsv1.DaemonSet
	engine  *appsv1.Deployment
	config  *corev1.ConfigMap
	policy  *networkingv1.NetworkPolicy
	service *corev1.Service // of the engine
	peers   *corev1.Service // of the hosts
	monitor *podMonitor
}

// podMonitor is the part of the Prometheus operator's type that the chart uses.
type podMonitor struct {
	metav1.TypeMeta   `json:",inline"`
	metav1.ObjectMeta `json:"metadata"`
	Spec              struct {
		Selector            metav1.LabelSelector `json:"selector"`
		PodMetricsEndpoints []struct {
			Port     string `json:"port"`
			Path     string `json:"path"`
			Interval string `json:"interval"`
		} `json:"podMetricsEndpoints"`
	} `json:"spec"`
}

// decode refuses fields that Kubernetes does not know, or that have another type.
func decode(files map[string]string) (*objects, error) {
	o := &objects{}
	var errs []error
	for file, text := range files {
		for _, doc := range bytes.Split([]byte(text), []byte("\n---\n"))[1:] { // after the head
			var kind struct{ APIVersion, Kind string }
			if err := yaml.Unmarshal(doc, &kind); err != nil {
				return o, fmt.Errorf("%s: %w", file, err)
			}
			what := kind.APIVersion + " " + kind.Kind
			var err error
			switch what {
			case "apps/v1 DaemonSet":
				err = strict(doc, &o.host)
			case "apps/v1 Deployment":
				err = strict(doc, &o.engine)
			case "v1 ConfigMap":
				err = strict(doc, &o.config)
			case "v1 Service":
				into := &o.service
				if file == "kvhost.yaml" {
					into = &o.peers
				}
				err = strict(doc, into)
			case "networking.k8s.io/v1 NetworkPolicy":
				err = strict(doc, &o.policy)
			case "monitoring.coreos.com/v1 PodMonitor":
				err = strict(doc, &o.monitor)
			default:
				err = errors.New("an object of an unexpected kind")
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %s: %w", file, what, err))
			}
		}
	}
	if o.host == nil || o.config == nil {
		errs = append(errs, errors.New("no DaemonSet or no ConfigMap"))
	}
	return o, errors.Join(errs...)
}

// have says which texts and numbers of a values file, and of the release, are not in the objects.
func (o *objects) have(file string, release [2]string) error {
	var v any
	if err := yaml.Unmarshal([]byte(file), &v); err != nil {
		return err
	}
	all := fmt.Sprintf("%+v\n", o.monitor)
	for _, part := range []any{o.host, o.engine, o.config, o.policy, o.service, o.peers} {
		text, err := yaml.Marshal(part)
		if err != nil {
			return err
		}
		all += string(text)
	}
	var errs []error
	var walk func(v any)
	walk = func(v any) {
		switch v := v.(type) {
		case map[string]any:
			for _, below := range v {
				walk(below)
			}
		case []any:
			for _, below := range v {
				walk(below)
			}
		case string:
			if first, _, _ := strings.Cut(v, "\n"); !strings.Contains(all, first) {
				errs = append(errs, fmt.Errorf("the text %q is in no object", v))
			}
		case float64:
			if n := strconv.FormatInt(int64(v), 10); !strings.Contains(all, n) || n != fmt.Sprint(v) && strings.Contains(all, fmt.Sprint(v)) {
				errs = append(errs, fmt.Errorf("the number %s is in no object, or as %v", n, v))
			}
		}
	}
	walk(v)
	for _, m := range []metav1.ObjectMeta{o.host.ObjectMeta, o.config.ObjectMeta} {
		if m.Namespace != release[1] || m.Labels["app.kubernetes.io/instance"] != release[0] {
			errs = append(errs, fmt.Errorf("an object of %s in %s", m.Labels["app.kubernetes.io/instance"], m.Namespace))
		}
	}
	return errors.Join(errs...)
}

// strict decodes as the server does: names of fields have one spelling.
func strict[T any](doc []byte, into **T) error {
	if *into != nil {
		return errors.New("two objects of the kind")
	}
	*into = new(T)
	text, err := yaml.YAMLToJSONStrict(doc)
	if err != nil {
		return err
	}
	errs, err := json.UnmarshalStrict(text, *into)
	return errors.Join(append(errs, err)...)
}
