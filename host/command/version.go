package command

import (
	"fmt"
	"runtime"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/plugins/dist"
)

// wheel is the version in pip's spelling. It is set by the linker.
var wheel string

func newVersion() *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "version",
		Short: "Print the version, the policy ABI and the embedded policies",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			names := dist.Names()
			if asJSON {
				return writeJSON(cmd.OutOrStdout(), map[string]any{"version": version, "wheel": wheel, "go": runtime.Version(), "os": runtime.GOOS,
					"arch": runtime.GOARCH, "policy_abi": abi.Version, "policy_release": abi.Release, "policies": names})
			}
			if len(names) == 0 {
				names = []string{"none"}
			}
			spelled := version
			if wheel != "" && wheel != version {
				spelled += " (to pip " + wheel + ")"
			}
			_, err := fmt.Fprintf(cmd.OutOrStdout(), "kvhost %s\n%s %s/%s\npolicy abi %d, release %s\nembedded policies: %s\n",
				spelled, runtime.Version(), runtime.GOOS, runtime.GOARCH, abi.Version, abi.Release, strings.Join(names, " "))
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
