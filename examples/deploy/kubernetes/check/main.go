//go:build ignore

// Command check renders the Helm chart and judges it: every object is decoded strictly into the types of Kubernetes, the
// parts of each fit together, the schema refuses wrong values, and the plain manifests are what the chart gives. No package has it:
// `make .build/bin/check-kubernetes` builds it, with the requirements of check.mod, so that kvhost does not depend on
// Kubernetes.
//
//	check-kubernetes [-update] [-config] DIRECTORY   # which has chart/, kvhost.yaml and vllm.yaml
package main

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

	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const head = "# kubectl create namespace kvhost && kubectl apply -n kvhost -f this file. It is what the chart gives with vllm.enabled:\n" +
	"# `make manifests` writes it.\n"

// plain is the rendering that the manifests without Helm are.
const plain = "with vLLM"

func main() {
	update := flag.Bool("update", false, "write the plain manifests")
	config := flag.Bool("config", false, "print the host's configuration")
	flag.Parse()
	if err := run(flag.Arg(0), *update, *config); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run(dir string, update, config bool) error {
	c, err := loader.Load(filepath.Join(dir, "chart"))
	if err != nil {
		return err
	}
	var errs []error
	type values = map[string]any
	for _, wrong := range []values{ // which the schema refuses
		{"typo": 1}, {"image": ""}, {"state": "relative"}, {"user": 0}, {"metricsFrom": nil}, {"traces": values{"port": 4318}},
		{"vllm": values{"replicas": "abc"}}, {"vllm": values{"gpu": 1}}, {"podMonitor": "yes"},
	} {
		if _, err := render(c, "kvhost", wrong); err == nil {
			errs = append(errs, fmt.Errorf("the chart takes %v", wrong))
		}
	}
	vllm := values{"enabled": true, "tokenSecret": "hf"}
	for name, v := range map[string]values{
		"defaults": {}, plain: {"vllm": values{"enabled": true}}, "no class": {"runtimeClass": ""},
		"other user": {"user": 1, "state": "/data", "run": "/data/run", "vllm": vllm},
		"everything": {"podMonitor": true, "priorityClass": "p", "annotations": values{"a": "b"}, "vllm": vllm,
			"imagePullSecrets": []any{values{"name": "r"}}, "env": []any{values{"name": "N", "value": "v"}},
			"affinity": values{"nodeAffinity": values{}}, "traces": values{"port": 4318, "namespace": values{"a": "b"}}},
	} {
		release := "kvhost"
		if name == "everything" {
			release = "other"
		}
		files, err := render(c, release, v)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		_, has := files["vllm.yaml"]
		if want := v["vllm"] != nil; has != want {
			errs = append(errs, fmt.Errorf("%s: has vLLM: %v", name, has))
		}
		objects, err := decode(files)
		errs = append(errs, err, objects.judge())
		if objects.host.Name != release || len(objects.policy.Spec.Egress) > 0 != (v["traces"] != nil) {
			errs = append(errs, fmt.Errorf("%s: the host is called %s, and may call %v", name, objects.host.Name, objects.policy.Spec.Egress))
		}
		if name != plain {
			continue
		}
		if config {
			fmt.Print(objects.config.Data["kvhost.toml"])
		}
		for file, text := range files {
			file = filepath.Join(dir, file)
			if update {
				errs = append(errs, os.WriteFile(file, []byte(text), 0o644))
			} else if plain, err := os.ReadFile(file); err != nil || string(plain) != text {
				errs = append(errs, fmt.Errorf("%s is not what the chart gives: make manifests (%v)", file, err))
			}
		}
	}
	return errors.Join(errs...)
}

// render gives the manifests of a release, vLLM's apart.
func render(c *chart.Chart, release string, values map[string]any) (map[string]string, error) {
	top, err := chartutil.ToRenderValues(c, values, chartutil.ReleaseOptions{Name: release, Namespace: "kvhost"}, nil)
	if err != nil {
		return nil, err
	}
	rendered, err := engine.Render(c, top)
	if err != nil {
		return nil, err
	}
	var names []string
	for name, text := range rendered {
		if strings.TrimSpace(text) != "" && path.Base(name) != "NOTES.txt" {
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

// objects are those of one rendering.
type objects struct {
	host   appsv1.DaemonSet
	engine *appsv1.Deployment // nil: none
	config corev1.ConfigMap
	policy networkingv1.NetworkPolicy
}

// decode refuses fields that Kubernetes does not know, or that have another type.
func decode(files map[string]string) (o objects, err error) {
	var errs []error
	seen := map[string]int{}
	for file, text := range files {
		for _, doc := range bytes.Split([]byte(text), []byte("\n---\n"))[1:] { // after the head
			var kind struct{ APIVersion, Kind string }
			if err := yaml.Unmarshal(doc, &kind); err != nil {
				return o, fmt.Errorf("%s: %w", file, err)
			}
			what := kind.APIVersion + " " + kind.Kind
			var into any
			switch what {
			case "apps/v1 DaemonSet":
				into = &o.host
			case "apps/v1 Deployment":
				o.engine = &appsv1.Deployment{}
				into = o.engine
			case "v1 ConfigMap":
				into = &o.config
			case "networking.k8s.io/v1 NetworkPolicy":
				into = &o.policy
			case "v1 Service":
				into = &corev1.Service{}
			case "monitoring.coreos.com/v1 PodMonitor":
				continue // Kubernetes has no type for it
			default:
				errs = append(errs, fmt.Errorf("%s: an object of an unexpected kind %q", file, what))
				continue
			}
			seen[what]++
			text, err := yaml.YAMLToJSONStrict(doc)
			if err != nil {
				return o, fmt.Errorf("%s: %s: %w", file, what, err)
			}
			// As the server does: names of fields have one spelling.
			strict, err := json.UnmarshalStrict(text, into)
			if err := errors.Join(append(strict, err)...); err != nil {
				errs = append(errs, fmt.Errorf("%s: %s: %w", file, what, err))
			}
		}
	}
	for _, what := range []string{"apps/v1 DaemonSet", "v1 ConfigMap", "networking.k8s.io/v1 NetworkPolicy"} {
		if seen[what] != 1 {
			errs = append(errs, fmt.Errorf("%d objects of %s, want 1", seen[what], what))
		}
	}
	return o, errors.Join(errs...)
}
