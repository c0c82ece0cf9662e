package policy

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/kvhost/kvhost/abi"
)

// Config is a policy's settings, as the operator wrote them.
type Config map[string]string

// check checks the settings against those that the manifest lists.
func (c Config) check(module string, options map[string]abi.Option) error {
	for _, key := range slices.Sorted(maps.Keys(c)) {
		o, ok := options[key]
		if !ok {
			return fmt.Errorf("%w: %s has no setting %q (%s)", ErrConfig, module, key, known(options))
		}
		if !o.Accepts(c[key]) {
			return fmt.Errorf("%w: %s: %s = %q: want type %s", ErrConfig, module, key, c[key], o.Type)
		}
	}
	return nil
}

func known(options map[string]abi.Option) string {
	if len(options) == 0 {
		return "it has none"
	}
	return "it has " + strings.Join(slices.Sorted(maps.Keys(options)), ", ")
}

// text returns the settings in the form for a guest: sorted lines "key=value\n".
func (c Config) text() (string, error) {
	var b strings.Builder
	for _, key := range slices.Sorted(maps.Keys(c)) {
		if key == "" || strings.ContainsAny(key, "=\n") || strings.Contains(c[key], "\n") {
			return "", fmt.Errorf("%w: %q = %q: a key has no '=', and neither has a line break", ErrConfig, key, c[key])
		}
		fmt.Fprintf(&b, "%s=%s\n", key, c[key])
	}
	if b.Len() > maxConfigText {
		return "", fmt.Errorf("%w: %d bytes of settings, at most %d", ErrConfig, b.Len(), maxConfigText)
	}
	return b.String(), nil
}

// Text returns the settings in a canonical form.
func (c Config) Text() string {
	text, err := c.text()
	if err != nil {
		return fmt.Sprintf("%q", map[string]string(c)) // no policy accepts such settings
	}
	return text
}
