package command

import (
	"fmt"
	"math"

	"github.com/spf13/cobra"
)

func newPolicy() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy",
		Short: "Write, check, pack and run policies",
		Args:  noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return usageError{fmt.Errorf("%s: want a subcommand", cmd.CommandPath())}
		},
	}
	cmd.AddCommand(newPolicyInspect(), newPolicyCheck(), newPolicyStep(), newPolicyNew(), newPolicyPack())
	cmd.AddCommand(newPolicyList(), newPolicySwap(), newPolicyPromote())
	return cmd
}

var wantFiles = wantArgs(1, math.MaxInt, "a .wasm file")
