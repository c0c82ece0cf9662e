package config

import (
	"strings"
	"testing"
)

// TestPeers: what could be read on the way, or is no address, is refused by the key.
func TestPeers(t *testing.T) {
	for want, p := range map[string]Peers{
		"":             {Hosts: "127.0.0.1:1, [::1]:2,a.example:3", Listen: "127.0.0.1:9477"},
		"peers.cert":   {Listen: "127.0.0.1:9477", Cert: "c", Key: "k"},
		"peers.listen": {Listen: "0.0.0.0:9477"},
		"peers.hosts":  {Hosts: "127.0.0.1:1,192.0.2.1:9477"},
		"peers.hosts:": {Hosts: "127.0.0.1"},
	} {
		var said []string
		p.validate(func(path, _ string, _ ...any) { said = append(said, path) })
		if got := strings.Join(said, " "); got != strings.TrimSuffix(want, ":") {
			t.Errorf("%+v is refused by %q, want %q", p, got, want)
		}
	}
	remote := Peers{Hosts: "192.0.2.1:9477", Listen: "0.0.0.0:9477", Cert: "c", Key: "k", CA: "a"}
	remote.validate(func(path, format string, args ...any) { t.Errorf("%s: "+format, append([]any{path}, args...)...) })
	if list := (&Peers{Hosts: " a:1, ,b:2,"}).List(); strings.Join(list, " ") != "a:1 b:2" {
		t.Errorf("hosts %q, want a:1 and b:2", list)
	}
	c := Default()
	c.Roots = []Root{{Path: "/kv", Capacity: 1 << 30, Level: maxLevel}}
	c.Peers.Hosts = "127.0.0.1:1"
	if err := c.Validate(); err == nil || !strings.Contains(err.Error(), "root[0].level") {
		t.Errorf("a root of the highest level before that of peers: %v, want root[0].level refused", err)
	}
}
