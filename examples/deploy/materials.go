package main

import (
	"debug/buildinfo"
	"encoding/json"
	"fmt"
)

// bill is a bill of materials in the form of CycloneDX 1.5.
type bill struct {
	Format     string      `json:"bomFormat"`
	Spec       string      `json:"specVersion"`
	Version    int         `json:"version"`
	Metadata   metadata    `json:"metadata"`
	Components []component `json:"components"`
}

type metadata struct {
	Component component `json:"component"`
}

type component struct {
	Type       string     `json:"type"`
	Ref        string     `json:"bom-ref"`
	Name       string     `json:"name"`
	Version    string     `json:"version"`
	URL        string     `json:"purl"`
	Properties []property `json:"properties,omitempty"`
}

type property struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// materials lists the contents of a binary as Go reports them: the modules, with the checksums of go.sum, and the
// standard library.
func materials(binary, version string) ([]byte, error) {
	info, err := buildinfo.ReadFile(binary)
	if err != nil {
		return nil, fmt.Errorf("what is in %s: %w", binary, err)
	}
	of := func(kind, path, version string) component {
		url := "pkg:golang/" + path + "@" + version
		return component{Type: kind, Ref: url, Name: path, Version: version, URL: url}
	}
	b := bill{Format: "CycloneDX", Spec: "1.5", Version: 1,
		Metadata: metadata{of("application", info.Main.Path, version)}}
	for _, setting := range info.Settings {
		if setting.Key == "GOARCH" || setting.Key == "GOOS" {
			b.Metadata.Component.Properties = append(b.Metadata.Component.Properties, property{setting.Key, setting.Value})
		}
	}
	b.Components = append(b.Components, of("library", "std", info.GoVersion))
	for _, m := range info.Deps {
		if m.Replace != nil {
			m = m.Replace
		}
		c := of("library", m.Path, m.Version)
		c.Properties = []property{{"go.sum", m.Sum}}
		b.Components = append(b.Components, c)
	}
	text, err := json.MarshalIndent(&b, "", "  ")
	return append(text, '\n'), err
}
