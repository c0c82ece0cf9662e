// Command tools lists the tools that this machine lacks, what the tests leave out without each, and how to get it.
//
//	go run ./abi/testenv/internal/tools    # the list; exit code 1 when something is missing and KVHOST_REQUIRE_TOOLS is 1
//	go run ./abi/testenv/internal/tools cc # no output; exit code 0 when the machine has it
//
// The names are cc, cargo, python and python-packages.
package main

import (
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi/testenv"
)

func main() {
	if names := os.Args[1:]; len(names) > 0 {
		os.Exit(has(names))
	}
	if missing := list(os.Stdout); missing && testenv.Required() {
		os.Exit(1)
	}
}

// short are the names for the command line.
var short = map[string]*testenv.Tool{
	"cc": testenv.CC, "cargo": testenv.Cargo,
	"python": testenv.Python, "python-packages": testenv.PythonPackages,
}

func has(names []string) int {
	for _, name := range names {
		tool, ok := short[name]
		if !ok {
			fmt.Fprintf(os.Stderr, "tools: no tool %q\n", name)
			return 2
		}
		if !tool.Have() {
			return 1
		}
	}
	return 0
}

// list says whether something is missing that can be installed.
func list(w io.Writer) (missing bool) {
	var lines, packages []string
	for _, tool := range testenv.Tools {
		if tool.Have() || tool.First() != tool {
			continue
		}
		lines = append(lines, fmt.Sprintf("  %s\n      without %s: %s", tool.Tests, tool.Name, tool.Fix()))
		missing = missing || !tool.Optional
		for p := range strings.FieldsSeq(tool.Packages) {
			if !slices.Contains(packages, p) {
				packages = append(packages, p)
			}
		}
	}
	if len(lines) == 0 {
		fmt.Fprintln(w, "Nothing was left out: this machine has every tool.")
		return false
	}
	fmt.Fprintf(w, "Left out:\n%s\n", strings.Join(lines, "\n"))
	if len(packages) > 0 {
		fmt.Fprintf(w, "All of it on Debian: apt-get install --no-install-recommends %s\n", strings.Join(packages, " "))
	}
	return missing
}
