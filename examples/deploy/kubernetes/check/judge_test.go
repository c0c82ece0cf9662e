//go:build ignore

package check

import (
	"errors"
	"fmt"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
)

// judge says where the parts of the objects do not fit together, which no schema tells.
func (o *objects) judge() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	host := &o.host.Spec.Template
	judgePod("the host", o.host.Spec.Selector, host, bad)
	run := socketVolume(&host.Spec)
	if run == "" {
		bad("the host has no directory of the node for its socket")
	}
	c := &host.Spec.Containers[0]
	s := c.SecurityContext
	if s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
		s.Capabilities == nil || len(s.Capabilities.Drop) != 1 || s.Capabilities.Drop[0] != "ALL" || len(s.Capabilities.Add) > 0 {
		bad("the host's security context is not that of a user without capabilities: %+v", s)
	}
	if c.Resources.Limits.Memory().IsZero() {
		bad("the host has no limit of memory")
	}
	if o.policy != nil {
		if !selects(&o.policy.Spec.PodSelector, host.Labels) {
			bad("the NetworkPolicy does not select the host")
		}
		if e := o.policy.Spec.Egress; e != nil && len(e) == 0 {
			bad("the NetworkPolicy has an empty list, which the server drops: each apply would be a change")
		}
		for _, rule := range o.policy.Spec.Ingress {
			for _, p := range rule.Ports {
				if !hasPort(c, p.Port) {
					bad("the NetworkPolicy names the port %s, which the host lacks", p.Port)
				}
			}
		}
	}
	o.judgePeers(bad)
	if m := o.monitor; m != nil && (!selects(&m.Spec.Selector, host.Labels) || !hasPort(c, &intstr.IntOrString{StrVal: m.Spec.PodMetricsEndpoints[0].Port})) {
		bad("the PodMonitor does not select the host's metrics")
	}
	for _, v := range host.Spec.Volumes {
		if v.ConfigMap != nil && v.ConfigMap.Name != o.config.Name {
			bad("the host mounts the ConfigMap %s, not %s", v.ConfigMap.Name, o.config.Name)
		}
	}
	if o.engine == nil {
		return errors.Join(errs...)
	}
	engine := &o.engine.Spec.Template
	judgePod("the engine", o.engine.Spec.Selector, engine, bad)
	if at := socketVolume(&engine.Spec); at != run {
		bad("the engine's directory for the socket is %q, the host's %q", at, run)
	}
	for _, pod := range []*corev1.PodSpec{&host.Spec, &engine.Spec} {
		if !pod.HostIPC || !pod.HostPID {
			bad("a pod without the node's IPC and PID namespaces: CUDA IPC does not work")
		}
	}
	if o.policy != nil && selects(&o.policy.Spec.PodSelector, engine.Labels) {
		bad("the NetworkPolicy selects the engine, too")
	}
	if s := o.service; s != nil && (!selects(&metav1.LabelSelector{MatchLabels: s.Spec.Selector}, engine.Labels) ||
		!hasPort(&engine.Spec.Containers[0], &s.Spec.Ports[0].TargetPort)) {
		bad("the Service does not lead to the engine")
	}
	if s := o.service; s != nil && len(validation.IsDNS1035Label(s.Name)) > 0 {
		bad("a Service cannot have the name %s", s.Name)
	}
	return errors.Join(errs...)
}

// judgePeers says where hosts do not reach each other.
func (o *objects) judgePeers(bad func(string, ...any)) {
	host := &o.host.Spec.Template
	c := &host.Spec.Containers[0]
	hosts := ""
	for _, e := range c.Env {
		if e.Name == "KVHOST_PEERS_HOSTS" {
			hosts = e.Value
		}
	}
	s := o.peers
	if (s == nil) != (hosts == "") {
		bad("peers by the name %q, and a Service: %t", hosts, s != nil)
	}
	if s == nil {
		return
	}
	port := &s.Spec.Ports[0]
	if s.Spec.ClusterIP != corev1.ClusterIPNone || !selects(&metav1.LabelSelector{MatchLabels: s.Spec.Selector}, host.Labels) ||
		!hasPort(c, &port.TargetPort) || hosts != fmt.Sprintf("%s.%s.svc:%d", s.Name, s.Namespace, port.Port) {
		bad("the Service %s does not lead to the hosts as %s", s.Name, hosts)
	}
	if len(validation.IsDNS1035Label(s.Name)) > 0 {
		bad("a Service cannot have the name %s", s.Name)
	}
	if o.policy == nil {
		return
	}
	in, out, names := false, false, false
	for _, rule := range o.policy.Spec.Ingress {
		in = in || reaches(rule.From, rule.Ports, host.Labels, port.TargetPort)
	}
	for _, rule := range o.policy.Spec.Egress {
		out = out || reaches(rule.To, rule.Ports, host.Labels, port.TargetPort)
		names = names || len(rule.To) == 0 && len(rule.Ports) > 0 && rule.Ports[0].Port.IntVal == 53
	}
	if !in || !out || !names {
		bad("the NetworkPolicy keeps peers apart: to the host %t, from it %t, names %t", in, out, names)
	}
}

// reaches says whether a rule is of pods of this namespace with these labels, and of a port.
func reaches(pods []networkingv1.NetworkPolicyPeer, ports []networkingv1.NetworkPolicyPort, labels map[string]string, port intstr.IntOrString) bool {
	return len(pods) == 1 && pods[0].NamespaceSelector == nil && pods[0].PodSelector != nil && selects(pods[0].PodSelector, labels) &&
		len(ports) == 1 && *ports[0].Port == port
}

// socketVolume is the directory of the node that a pod mounts as "run", at the same path.
func socketVolume(pod *corev1.PodSpec) string {
	for _, v := range pod.Volumes {
		if v.Name != "run" || v.HostPath == nil {
			continue
		}
		for _, m := range pod.Containers[0].VolumeMounts {
			if m.Name == v.Name && m.MountPath == v.HostPath.Path {
				return m.MountPath
			}
		}
	}
	return ""
}

func judgePod(who string, s *metav1.LabelSelector, pod *corev1.PodTemplateSpec, bad func(string, ...any)) {
	if s == nil || !selects(s, pod.Labels) {
		bad("%s: the selector does not match its own pods", who)
	}
	if len(pod.Spec.Containers) != 1 {
		bad("%s: %d containers, want 1", who, len(pod.Spec.Containers))
		pod.Spec.Containers = make([]corev1.Container, 1)
	}
	volumes, used := map[string]bool{}, map[string]bool{}
	for _, v := range pod.Spec.Volumes {
		volumes[v.Name] = true
	}
	for _, c := range append(pod.Spec.InitContainers, pod.Spec.Containers...) {
		if c.Image == "" {
			bad("%s: the container %s has no image", who, c.Name)
		}
		for _, m := range c.VolumeMounts {
			if used[m.Name] = true; !volumes[m.Name] {
				bad("%s: %s mounts %s, which is no volume", who, c.Name, m.Name)
			}
		}
	}
	for v := range volumes {
		if !used[v] {
			bad("%s: nothing mounts the volume %s", who, v)
		}
	}
	c := &pod.Spec.Containers[0]
	for what, p := range map[string]*corev1.Probe{"startup": c.StartupProbe, "liveness": c.LivenessProbe,
		"readiness": c.ReadinessProbe} {
		if p == nil || p.HTTPGet == nil || !hasPort(c, &p.HTTPGet.Port) {
			bad("%s: no %s probe, or one of a port that it lacks", who, what)
		}
	}
}

func selects(s *metav1.LabelSelector, pod map[string]string) bool {
	sel, err := metav1.LabelSelectorAsSelector(s)
	return err == nil && !sel.Empty() && sel.Matches(labels.Set(pod))
}

func hasPort(c *corev1.Container, port *intstr.IntOrString) bool {
	for _, p := range c.Ports {
		if port != nil && (p.Name == port.StrVal || p.ContainerPort == port.IntVal && port.IntVal != 0) {
			return true
		}
	}
	return false
}
