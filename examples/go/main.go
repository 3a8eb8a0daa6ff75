// Prints tokens from Outrider's gRPC API as they come: go run . ADDRESS [ID...]
package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"log"
	"os"
	"strconv"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"example.com/outrider/outriderv1"
)

func main() {
	log.SetFlags(0)
	if len(os.Args) < 2 {
		log.Fatal("usage: generate ADDRESS [ID...]")
	}
	ids := []int32{504, 3575, 282, 4649, 314}
	if len(os.Args) > 2 {
		ids = nil
		for _, word := range os.Args[2:] {
			id, err := strconv.ParseInt(word, 10, 32)
			if err != nil {
				log.Fatal(err)
			}
			ids = append(ids, int32(id))
		}
	}
	if err := generate(os.Args[1], ids); err != nil {
		log.Fatal(err)
	}
}

// generate streams one answer to standard output.
func generate(address string, ids []int32) error {
	// WithInsecure is what old releases of gRPC have too; where verify wants TLS, WithTransportCredentials.
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		return err
	}
	defer connection.Close()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()

	prompt := new(bytes.Buffer)
	if err := binary.Write(prompt, binary.LittleEndian, ids); err != nil {
		return err
	}
	stream, err := outriderv1.NewVerifyServiceClient(connection).Generate(ctx, &outriderv1.GenerateRequest{
		PromptTokens: prompt.Bytes(),
		Sampling:     &outriderv1.SamplingParams{Temperature: proto.Float32(0), MaxTokens: proto.Uint32(16)},
	})
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		show(response)
	}
}

// show prints one line for what one step committed.
func show(response *outriderv1.GenerateResponse) {
	words := make([]string, len(response.Tokens))
	for at, token := range response.Tokens {
		words[at] = strconv.Itoa(int(token))
		if uint32(at) < response.NumAccepted {
			words[at] = "[" + words[at] + "]"
		}
	}
	if len(words) > 0 {
		fmt.Println(strings.Join(words, " "))
	}
	if finish := response.Finish; finish != nil {
		fmt.Printf("%d tokens in %d steps\n", finish.CompletionTokens, finish.Speculation.GetVerifySteps())
	}
}
