package command

import (
	"cmp"
	"os"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kvhost/kvhost/host/internal/config"
)

// settings are the flags that override the configuration: one for each key, and --config, --policy and --root.
type settings struct {
	file  string
	given []config.Setting
}

// addTo declares the flags. The help shows the everyday ones, and --help-all shows all.
func (s *settings) addTo(cmd *cobra.Command) {
	f := cmd.Flags()
	f.SortFlags = false
	f.StringVarP(&s.file, "config", "c", "", "TOML file (default: $"+config.EnvFile+", else none)")
	s.flag(f, "root", "path[=capacity]", "directory that holds chunks; repeatable")
	s.flag(f, "policy", "module",
		"policy module, a .wasm file or the name of an embedded one; repeatable, one per role")
	for _, k := range config.Keys() {
		usage, hidden := k.Help, true
		if slices.Contains(everyday, k.Path()) {
			first, _, _ := strings.Cut(k.Help, ". ")
			usage, hidden = strings.TrimSuffix(first, "."), false
		}
		flag := s.flag(f, k.Path(), kindName(k.Kind), usage)
		flag.DefValue, flag.Hidden = k.Default, hidden
		flag.Annotations = map[string][]string{sectionOf: {k.Section}}
		if k.Kind == config.Flag {
			flag.NoOptDefVal = "true"
		}
		if k.Kind == config.Choice {
			choices := cobra.FixedCompletions(k.Choices, cobra.ShellCompDirectiveNoFileComp)
			if err := cmd.RegisterFlagCompletionFunc(flag.Name, choices); err != nil {
				panic(err) // the flag was declared above
			}
		}
	}
}

func (s *settings) flag(f *pflag.FlagSet, key, kind, usage string) *pflag.Flag {
	return f.VarPF(&setting{key: key, kind: kind, into: s}, config.FlagName(key), "", usage)
}

func (s *settings) load() (*config.Loaded, error) {
	return config.Load(config.Source{File: cmp.Or(s.file, os.Getenv(config.EnvFile)), Env: os.Environ(), Flags: s.given})
}

// config loads the configuration without the origins.
func (s *settings) config() (*config.Config, error) {
	loaded, err := s.load()
	if err != nil {
		return nil, err
	}
	return &loaded.Config, nil
}

// setting is the value of one flag. It is kept as text and checked together with all others.
type setting struct {
	key, kind string
	into      *settings
}

func (v *setting) String() string { return "" }
func (v *setting) Type() string   { return v.kind }
func (v *setting) Set(text string) error {
	v.into.given = append(v.into.given, config.Setting{Key: v.key, Value: text})
	return nil
}

func kindName(k config.Kind) string {
	switch k {
	case config.Count:
		return "count"
	case config.Flag:
		return "bool"
	}
	return string(k)
}
