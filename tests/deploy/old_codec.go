// Added to examples/go by the test that builds it with the gRPC of Debian 12, which is older than the stubs' protobuf.
package main

import (
	"google.golang.org/grpc/encoding"
	"google.golang.org/protobuf/proto"
)

type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(message interface{}) ([]byte, error) {
	return proto.Marshal(message.(proto.Message))
}

func (codec) Unmarshal(data []byte, message interface{}) error {
	return proto.Unmarshal(data, message.(proto.Message))
}

func init() { encoding.RegisterCodec(codec{}) }
