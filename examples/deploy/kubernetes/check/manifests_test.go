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

type values = map[string]any

// plain are the values of the plain manifests.
var plain = values{"vllm": values{"enabled": true}}

// good are values that the chart takes.
var good = map[string]values{
	"plain":      plain,
	"no class":   {"runtimeClass": "", "nodeSelector": nil, "tolerations": nil},
	"other user": {"user": 1, "state": "/data", "run": "/data/run", "vllm": values{"enabled": true}},
	"all": {
		"imagePullSecrets": []any{values{"name": "login"}}, "affinity": values{"nodeAffinity": values{}}, "priorityClassName": "high",
		"podAnnotations": values{"a": "b"}, "env": []any{values{"name": "A", "value": "b"}},
		"volumes":       []any{values{"name": "tokens", "secret": values{"secretName": "tokens"}}},
		"volumeMounts":  []any{values{"name": "tokens", "mountPath": "/etc/tokens"}},
		"config":        "[otlp]\nendpoint = \"http://collector:4318\"\n[[root]]\npath = \"/var/lib/kvhost/kv\"\n",
		"networkPolicy": values{"egress": []any{values{"ports": []any{values{"protocol": "TCP", "port": 4318}}}}},
		"podMonitor":    values{"enabled": true, "labels": values{"release": "prometheus"}},
		"vllm":          values{"enabled": true, "args": []any{"--seed=1"}, "env": []any{values{"name": "B", "value": "c"}}, "hfTokenSecret": "hf"},
	},
	"peers":     {"peers": values{"secret": "kvhost-peers"}, "vllm": values{"enabled": true}},
	"no policy": {"networkPolicy": values{"enabled": false}, "vllm": values{"enabled": true, "service": false}},
}

// bad are values that the chart refuses, and what it says.
var bad = map[string]values{
	"replicas":    {"vllm": values{"replicas": "abc"}},
	"typo":        {"typo": 1},
	"image":       {"image": ""},
	"state":       {"state": "relative"},
	"user":        {"user": 0},
	"metricsFrom": {"networkPolicy": values{"metricsFrom": values{"kubernetes.io/metadata.name": nil}}},
	"config":      {"config": "socket = 1"},
	"limits":      {"resources": values{"limits": nil}},
	"egress":      {"config": "[otlp]\n[[root]]\n"},
	"peers":       {"peers": values{"secret": 1}},
}

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
		if _, err := render(c, "kvhost", v); err == nil || !strings.Contains(err.Error(), says) {
			errs = append(errs, fmt.Errorf("values that are wrong, %v: %v, want an error about %s", v, err, says))
		}
	}
	for name, v := range good {
		var seen [2]*objects // of two releases
		for i, release := range []string{"kvhost", "1.blue"} {
			files, err := render(c, release, v)
			if err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			if seen[i], err = decode(files); err == nil {
				err = seen[i].judge()
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s, as %s: %w", name, release, err))
			}
			if name == "plain" && release == "kvhost" {
				errs = append(errs, compare(dir, files, update))
				if config {
					fmt.Print(seen[i].config.Data["kvhost.toml"])
				}
			}
		}
		if a, b := seen[0], seen[1]; a != nil && b != nil && (a.host.Name == b.host.Name || a.config.Name == b.config.Name ||
			selects(a.host.Spec.Selector, b.host.Spec.Template.Labels)) {
			errs = append(errs, fmt.Errorf("%s: two releases of a namespace have the same objects", name))
		}
	}
	files, err := render(c, "kvhost", nil)
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

// render gives the manifests, vLLM's apart.
func render(c *chart.Chart, release string, v values) (map[string]string, error) {
	top, err := chartutil.ToRenderValues(c, v, chartutil.ReleaseOptions{Name: release, Namespace: "kvhost"}, nil)
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
