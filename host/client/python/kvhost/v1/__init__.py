"""Generated from kvhost/v1/kvhost.proto by protoc; see host/proto/generate.sh."""
