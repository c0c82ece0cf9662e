package abi

import (
	"cmp"
	"fmt"
	"strconv"
	"strings"
)

// Release is this host's release, which is compared with a manifest's min_host. It is raised when a host offers modules a new
// feature.
const Release = "0.3"

// release parses at most three numbers separated by points. Missing numbers are 0.
func release(text string) (r [3]int, err error) {
	parts := strings.Split(text, ".")
	if len(parts) > len(r) {
		return r, fmt.Errorf("abi: manifest: min_host %q, want numbers as in 0.1", text)
	}
	for i, p := range parts {
		if r[i], err = strconv.Atoi(p); err != nil || r[i] < 0 {
			return r, fmt.Errorf("abi: manifest: min_host %q, want numbers as in 0.1", text)
		}
	}
	return r, nil
}

// Runs returns an error if a host of a release is too old for the module.
func (m *Manifest) Runs(host string) error {
	if m.MinHost == "" {
		return nil
	}
	least, err := release(m.MinHost)
	if err != nil {
		return err
	}
	have, err := release(host)
	if err != nil {
		return err
	}
	for i := range least {
		switch cmp.Compare(have[i], least[i]) {
		case 1:
			return nil
		case -1:
			return fmt.Errorf("abi: manifest: %s wants a host of release %s or later, this one is %s", m.Name, m.MinHost, host)
		}
	}
	return nil
}
