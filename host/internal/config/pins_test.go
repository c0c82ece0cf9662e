package config

import (
	"bytes"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/kvhost/kvhost/abi/testenv"
	"github.com/kvhost/kvhost/host/kv"
)

func TestPins(t *testing.T) {
	file := write(t,
		"[session]\nmax_keys = 8\n[session.pins]\ndtype = \"bf16\"\ntensor_parallel = 8\nreplicated = true\n\"group.0\" = \"prefix x\"\n[session.pins.extra]\nlora = \"a # b\"\n")
	l, err := Load(Source{File: file})
	testenv.OK(t, err)
	want := map[string]string{"dtype": "bf16", "tensor_parallel": "8", "replicated": "true", "group.0": "prefix x",
		"extra.lora": "a # b"}
	if got := l.Config.Session.Pins; !reflect.DeepEqual(got, want) {
		t.Fatalf("pins %q, want %q", got, want)
	}
	var out bytes.Buffer
	testenv.OK(t, l.Print(&out))
	if !strings.Contains(out.String(), "\"dtype\" = \"bf16\" # file "+file+":4\n") {
		t.Errorf("no origin in\n%s", out.String())
	}
	again, err := Load(Source{File: write(t, out.String())})
	if err != nil || !reflect.DeepEqual(again.Config, l.Config) {
		t.Errorf("read back %+v, %v", again, err)
	}
	l.Config.Clone().Session.Pins["dtype"] = "x"
	if l.Config.Session.Pins["dtype"] != "bf16" {
		t.Error("a clone shares the pins")
	}
}

// The commented table of the example is valid configuration, and names every field.
func TestExamplePins(t *testing.T) {
	for _, name := range pinFields {
		if !strings.Contains(examplePins, name) {
			t.Errorf("the example does not mention %s", name)
		}
	}
	_, table, _ := strings.Cut(examplePins, "#\n# ")
	l, err := Load(Source{File: write(t, strings.ReplaceAll(table, "\n# ", "\n"))})
	if err != nil || l.Config.Session.Pins["tensor_parallel"] != "8" {
		t.Errorf("load the example: got %v, %v", l, err)
	}
}

// The configuration knows the fields that a namespace has.
func TestPinFields(t *testing.T) {
	var have []string
	for line := range strings.Lines((&kv.Namespace{}).Text()) {
		name, _, _ := strings.Cut(line, "=")
		have = append(have, name)
	}
	if want := slices.Sorted(slices.Values(pinFields)); !slices.Equal(have, want) {
		t.Errorf("a namespace has %q, the configuration takes %q", have, want)
	}
}
