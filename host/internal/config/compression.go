package config

import (
	"slices"
	"strconv"
	"strings"

	"github.com/kvhost/kvhost/host/internal/codec"
	"github.com/kvhost/kvhost/host/kv"
)

// Compression sets how the chunks of some namespaces are stored.
type Compression struct {
	Namespaces []string `toml:"namespaces,omitempty"` // patterns: see [kv.ParsePattern]; a namespace must match one of them
	Mode       string   `toml:"mode"`                 // CompressionOff, CompressionAuto or CompressionHuffman
}

func (c *Config) validateCompression(bad func(wrong bool, path, format string, args ...any)) {
	choices := byPath["store.compression"].Choices
	for i, m := range c.Compressions {
		at := "compression[" + strconv.Itoa(i) + "]"
		bad(len(m.Namespaces) == 0, at+".namespaces",
			"none: want patterns such as [\"meta-llama/*\"]; store.compression is for all others")
		if _, err := kv.ParsePatterns(m.Namespaces); err != nil {
			bad(true, at+".namespaces", "%v", err)
		}
		bad(!slices.Contains(choices, m.Mode), at+".mode",
			"%q, want one of %s%s", m.Mode, strings.Join(choices, ", "), Suggest(m.Mode, choices))
	}
}

var modes = map[string]codec.Mode{
	CompressionOff: codec.Never, CompressionAuto: codec.Faster, CompressionHuffman: codec.Gaining,
}

// Modes returns the compression modes of namespaces.
func (c *Config) Modes() codec.Modes {
	out := codec.Modes{Rest: modes[c.Store.Compression]}
	for _, m := range c.Compressions {
		patterns, _ := kv.ParsePatterns(m.Namespaces) // cannot fail: the patterns were validated
		out.Rules = append(out.Rules, codec.Rule{Namespaces: patterns, Mode: modes[m.Mode]})
	}
	return out
}

// Compresses reports whether any chunks may be compressed.
func (c *Config) Compresses() bool {
	m := c.Modes()
	return m.Any(codec.Gaining) || m.Any(codec.Faster)
}
