"""Generated from kvhost/v1/kvhost.proto by protoc; see host/internal/proto/generate.sh."""
