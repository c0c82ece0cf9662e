package command

import (
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/host/internal/config"
)

func newConfig() *cobra.Command {
	var s settings
	var defaults, asJSON bool
	cmd := &cobra.Command{
		Use:   "config",
		Short: "Print the effective configuration, with the origin of each value",
		Example: `  kvhost config --config /etc/kvhost.toml
  KVHOST_LOG_LEVEL=debug kvhost config | grep -v '# default'
  kvhost config --defaults > kvhost.toml`,
		Args: noArgs,
		RunE: func(*cobra.Command, []string) error {
			if defaults {
				return config.Example(stdout)
			}
			loaded, err := s.load()
			if err != nil {
				return err
			}
			for _, w := range loaded.Warnings {
				fmt.Fprintf(os.Stderr, "kvhost: warning: %s\n", w)
			}
			if !asJSON {
				return loaded.Print(stdout)
			}
			v, err := loaded.JSON()
			return errors.Join(err, writeJSON(stdout, v))
		},
	}
	cmd.Flags().BoolVar(&defaults, "defaults", false, "print a commented file of all keys and their defaults instead")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON: the configuration, and the origin of each value")
	s.addTo(cmd)
	return cmd
}
