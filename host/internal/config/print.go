package config

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// Print writes the effective configuration as TOML, with the origin of each value as a comment. The output can be read
// back.
func (l *Loaded) Print(w io.Writer) error {
	b := bufio.NewWriter(w)
	section := ""
	for _, k := range keys {
		if k.Section != section {
			section = k.Section
			fmt.Fprintf(b, "\n[%s]%s\n", section, l.allDefault(section))
		}
		fmt.Fprintf(b, "%s = %s # %s\n", k.Name, k.toml(&l.Config), l.Origins[k.Path()])
	}
	l.printPins(b)
	for _, t := range tables {
		t.print(b, l)
	}
	return b.Flush()
}

// allDefault is the comment of a section in which nothing was set.
func (l *Loaded) allDefault(section string) string {
	for _, k := range keys {
		if k.Section == section && l.Origins[k.Path()].From != FromDefault {
			return ""
		}
	}
	return " # default"
}

const exampleHead = `# kvhost configuration: every key with its default. Without a line, its default holds.
#
# The environment overrides this file (KVHOST_LOG_LEVEL=debug sets level in [log]), and flags override both
# (--log-level debug). KVHOST_POLICY and KVHOST_ROOT are comma-separated lists.
# Sizes: bytes, or text with a unit: K, KiB, M, MiB and so on up to P (1024), or KB, MB, GB, TB, PB (1000). Durations: "250ms", "1h30m".
# ` + "`kvhost config`" + ` prints the effective configuration and where each value comes from.
# ` + "`kvhost config --defaults`" + ` prints this file.
`

const exampleArrays = `
# Policies. An evict policy belongs to the roots that name it (evict = "..." below); one that no root names evicts in
# all others. Admit, place and layout policies belong to namespaces: the first policy with a matching pattern has the
# role, and one without patterns has the rest. A role without a policy gets the built-in one (evict: lru, admit:
# everything, place: fanout, layout: layermajor). At SIGHUP a running host reads this file again and gets the
# policies that it has then.
#
# [[policy]]
# # Name in metrics and ` + "`kvhost policy`" + `. Default: the module's name without directory and ".wasm".
# name = "lru"
# # Path of a .wasm file, or the name of an embedded one. No default.
# module = "lru.wasm"
# # Roles it takes (evict, admit, place, layout). Default: [], all that it has.
# roles = []
# # Namespaces that it admits, places and lays out for: globs over the model, or FIELD=GLOB over any line of a
# # namespace ("meta-llama/*", "dtype=fp8*"). Default: [], all that no other policy's patterns match.
# namespaces = []
# # Levels of roots to which it admits what moves there from other levels, if it is an admit policy. Default: [], none:
# # the built-in rule decides about moves, and the policy about what is new.
# levels = []
# # Shadow: the policy decides nothing. It sees the live requests and evicts from an imaginary cache of this size (0:
# # the size of all roots). ` + "`kvhost policy list`" + ` shows its hit ratio next to the real one. Default: false and 0.
# shadow = false
# capacity = 0
# # Imports that it may use (clock, metrics, random, wasi-stub) if its manifest asks for them. Default: [].
# grants = []
# # SHA-256 of the module, in hexadecimal. Another module is refused. Default: "", any.
# sha256 = ""
# # Public key of minisign (the line of base64) that must have signed the module, in <module>.minisig. Default: "",
# # none.
# public_key = ""
# # After a fault. builtin: the built-in policy decides while the module is restarted, and for good after six faults
# # in ten minutes. stop: the host ends. Default: "builtin".
# on_fault = "builtin"
# # Most memory of an instance, if its manifest does not ask for less. Unit: pages of 64KiB. Default: 0, which is 1024
# # and, for a policy that evicts, 128 bytes for each slot.
# memory_pages = 0
# # Fuel of a call and, on top, of each record: about a unit per instruction. A call that needs more is a fault.
# # Default: 0, which is 500000 and 2000, or more when the manifest asks for it, up to 6000000 in all. time: CPU time
# # of a call that sessions wait for, measured every 64000 units. Default: 0s, which is 3 ms.
# fuel = {call = 0, record = 0, time = "0s"}
# # The policy's own settings, checked against its manifest. Default: none.
# [policy.config]
# # window = 10

# Roots: the directories that hold pieces. One entry or more replaces this default.
[[root]]
# Directory, created when it is missing, in one that exists. "memory:", or "memory:name" where there are several, is
# page-locked memory of the host instead, which is empty after a start. Default: "kvhost-data".
path = "kvhost-data"
# Most bytes on disk, or all bytes of memory. Unit: bytes, or a percentage of the file system such as "80%". Default: "10GiB".
capacity = "10GiB"
# Level, 0 to 7: chunks are stored into the roots of the lowest level and looked for there first. A root in memory has
# the level that stands here, like any other. Default: 0.
level = 0
# back: chunks are copied to the next level when they are evicted. through: as soon as they are stored. Default: "back".
write = "back"
# Whether other hosts use it, too. Default: false.
shared = false
# Refuse the root while it is on the file system of /: its disk is not mounted then. Default: false.
require_mount = false
# Route of its pieces to and from GPUs. direct: cuFile. staged: page-locked host memory. auto: whichever was faster
# when both were tried at start. What fails on the direct route is staged. Default: "auto".
route = "auto"
# Name of the policy that evicts here. Default: "", the evict policy that no root names.
evict = ""
# Free space to leave on its file system. When others take more of it, kvhost evicts. Unit: bytes, or a percentage of
# the file system such as "5%". Default: 0.
min_free = 0
# Daily write budget of the device (UTC days). From 80 % on, only chunks are stored that continue a resident one or
# are offered for the second time; at 100 %, none. It survives a restart. Unit: bytes. Default: 0, no budget.
daily_writes = 0

# Tenants: quotas, users and limits. Of each key the first entry counts that matches a tenant and has the key. Default: none.
#
# [[tenant]]
# # A tenant's number, a range such as "3-9", or "*" for all: each has the quota for itself. No default.
# id = "*"
# # Most bytes of its entries. At its quota it evicts its own entries, and no others. Unit: bytes over all roots,
# # divided by their capacities, or a percentage of each root. Default: none.
# quota = "20%"
# # Users that may be this tenant. Once any entry has users, a user's process is only the tenants that name
# # the user; root is no exception. Default: none, every process that can connect may be any tenant.
# uids = [1001]
# # It finds its own entries only, and no other tenant finds those. Default: false, tenants share what they store: a hit
# # tells that some tenant had the same text.
# private = true
# # Most sessions. Default: none, session.max_sessions for all.
# sessions = 64

# Expiry: how long the entries of a model are served after they were stored. The first pattern that matches counts.
# Default: none, until they are evicted.
#
# [[expiry]]
# # A model's name; * and ? stand for anything but "/". No default.
# model = "meta-llama/*"
# # Unit: a duration. No default.
# ttl = "24h"

# Compression of some namespaces, where store.compression is not what they need. The first entry that matches counts.
# Default: none, store.compression for all.
#
# [[compression]]
# # Globs over the model, or FIELD=GLOB over any line of a namespace, as in [[policy]]. No default.
# namespaces = ["meta-llama/*", "dtype=bf16"]
# # One of: off, auto, huffman, as in store.compression. No default.
# mode = "huffman"
`

// Example writes the commented file of all keys with their defaults.
func Example(w io.Writer) error {
	b := bufio.NewWriter(w)
	b.WriteString(exampleHead)
	c := Default()
	section := ""
	for _, k := range keys {
		if k.Section != section {
			section = k.Section
			fmt.Fprintf(b, "\n[%s]", section)
		}
		b.WriteByte('\n')
		for _, line := range Wrap(k.Help, 118) {
			fmt.Fprintf(b, "# %s\n", line)
		}
		fmt.Fprintf(b, "# %sDefault: %s.\n%s = %s\n", k.unit(), k.toml(c), k.Name, k.toml(c))
	}
	b.WriteString(examplePins)
	b.WriteString(exampleArrays)
	return b.Flush()
}

// unit describes the value: choices, unit and range.
func (k *Key) unit() string {
	unit := k.Unit
	switch k.Kind {
	case Choice:
		return "One of: " + strings.Join(k.Choices, ", ") + ". "
	case Size:
		unit = strings.TrimSuffix("bytes, "+k.Unit, ", ")
	case Duration:
		unit = "a duration"
	case Ratio:
		unit = "0 to 1 " + k.Unit
	}
	if unit == "" {
		return ""
	}
	return "Unit: " + unit + ". "
}

// Usage is the help of the key's flag.
func (k *Key) Usage() string { return strings.TrimSpace(k.Help + " " + k.unit()) }

// Wrap breaks a text into lines of at most so many bytes.
func Wrap(text string, width int) []string {
	var lines []string
	line := ""
	for word := range strings.FieldsSeq(text) {
		if line != "" && len(line)+1+len(word) > width {
			lines = append(lines, line)
			line = ""
		}
		if line != "" {
			line += " "
		}
		line += word
	}
	return append(lines, line)
}
