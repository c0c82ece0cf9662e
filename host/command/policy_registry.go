package command

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"github.com/spf13/cobra"

	"github.com/kvhost/kvhost/abi"
	"github.com/kvhost/kvhost/host/internal/policy"
	"github.com/kvhost/kvhost/host/internal/policy/artifact"
	"github.com/kvhost/kvhost/host/internal/policy/sandbox"
	"github.com/kvhost/kvhost/host/internal/regular"
)

// registryFlags are those of push and pull.
type registryFlags struct {
	artifact.Options
	timeout   time.Duration
	publicKey string
}

func (c *registryFlags) flags(cmd *cobra.Command) {
	cmd.Flags().BoolVar(&c.PlainHTTP, "plain-http", false, "no TLS, and so no credentials; a registry on loopback needs no flag")
	cmd.Flags().DurationVar(&c.timeout, "timeout", 2*time.Minute, "for all of it")
	cmd.Flags().StringVar(&c.publicKey, "public-key", "", "refuse a module without a signature by this minisign key")
}

// check is what a host checks before it compiles a module from a file.
func (c *registryFlags) check(ctx context.Context, path string) error {
	i, err := policy.Inspect(ctx, path, policy.Options{
		PublicKey: c.publicKey, Grants: []string{abi.GrantClock, abi.GrantMetrics, abi.GrantRandom},
	})
	if err == nil {
		err = i.Refused
	}
	return err
}

func newPolicyPush() *cobra.Command {
	c := registryFlags{Options: artifact.Options{Version: version}}
	cmd := &cobra.Command{
		Use:   "push FILE oci://REGISTRY/NAME[:TAG]",
		Short: "Push a module, and the signature beside it, to an OCI registry",
		Long: `Pushes a module to an OCI registry, with FILE` + policy.SignatureSuffix + ` if that is there, and prints the reference that pins both. Credentials
are those of docker login.`,
		Example: "  kvhost policy push mine.wasm oci://registry.example.com/policies/mine:1.2",
		Args:    wantArgs(2, 2, "a .wasm file and a reference"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := context.WithTimeout(cmd.Context(), c.timeout)
			defer stop()
			r, err := artifact.Parse(args[1])
			if err != nil {
				return err
			}
			if r.Digest != "" {
				return fmt.Errorf("%w: %s: the digest follows from what is pushed: want a tag or none", artifact.ErrReference, r)
			}
			if err := c.check(ctx, args[0]); err != nil {
				return err
			}
			module, err := regular.ReadFile(ctx, args[0], sandbox.MaxModuleBytes)
			if err != nil {
				return err
			}
			signature, err := regular.ReadFile(ctx, args[0]+policy.SignatureSuffix, artifact.MaxSignature)
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
			a, err := artifact.Pack(r.Name(), module, signature)
			if err != nil {
				return err
			}
			if err := artifact.Push(ctx, r, a, c.Options); err != nil {
				return err
			}
			return printPin(cmd, r, a)
		},
	}
	c.flags(cmd)
	return cmd
}

func newPolicyPull() *cobra.Command {
	c := registryFlags{Options: artifact.Options{Version: version}}
	var store string
	cmd := &cobra.Command{
		Use:   "pull oci://REGISTRY/NAME@sha256:DIGEST",
		Short: "Bring a module from an OCI registry into the local store",
		Long: `Brings a module and its signature from an OCI registry into the local store, from which hosts start without a network, and prints
what to write into the configuration. With :TAG it says which digest the tag has now. Credentials are those of docker login.`,
		Example: `  kvhost policy pull oci://registry.example.com/policies/mine:1.2
  kvhost policy pull --public-key RWQ... oci://registry.example.com/policies/mine@sha256:...`,
		Args: wantArgs(1, 1, "a reference"),
		RunE: func(cmd *cobra.Command, args []string) error {
			ctx, stop := context.WithTimeout(cmd.Context(), c.timeout)
			defer stop()
			r, err := artifact.Parse(args[0])
			if err != nil {
				return err
			}
			a, err := artifact.Pull(ctx, r, sandbox.MaxModuleBytes, c.Options)
			if err != nil {
				return err
			}
			path, err := artifact.Write(ctx, store, r, a, func(path string) error { return c.check(ctx, path) })
			if err != nil {
				return err
			}
			fmt.Fprintf(cmd.ErrOrStderr(), "in %s\n", path)
			return printPin(cmd, r, a)
		},
	}
	c.flags(cmd)
	cmd.Flags().StringVar(&store, "store", artifact.DefaultStore, "the local store: policy_store in the host's configuration")
	return cmd
}

// printPin prints what pins an artifact in the configuration.
func printPin(cmd *cobra.Command, r artifact.Reference, a *artifact.Artifact) error {
	signed := "no signature"
	if a.Signature != nil {
		signed = "signed"
	}
	_, err := fmt.Fprintf(cmd.OutOrStdout(), "module = %q # %d bytes, %s\n", r.At(a.Digest), len(a.Module), signed)
	return err
}
