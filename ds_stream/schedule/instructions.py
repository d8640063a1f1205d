"""What one stage can be told to do. Each docstring is the instruction's specification.

A *launch* ``u`` is the stream batch that enters the ring at tick ``u``; all instructions of a launch carry its number,
and messages of one kind between two stages are matched in order of launch.
"""

from deepspeed.runtime.pipe.schedule import PipeInstruction


class StreamInstruction(PipeInstruction):
    """An instruction of a launch.

    Args:
        launch: tick at which the first stage runs this launch.
    """

    def __init__(self, launch: int, **kwargs: object):
        super().__init__(launch=launch, **kwargs)


class SendPlan(StreamInstruction):
    """Pass the plan on, ahead of the data, and with it what earlier stages and this one have timed.

    Roughly: ``control.send(plan, timings, stage=next)``

    Pairs with the plan iterator of the next stage's schedule.
    """


class ReturnTimings(StreamInstruction):
    """Hand what all stages have timed to the controller; last stage only.

    Roughly: ``control.send(timings, rank=0)``

    Pairs with the controller's collector.
    """


class Repartition(StreamInstruction):
    """Give away the layers that other stages hold from here on, with what sessions and prompts keep in them, and take
    in those that this stage holds. No row is in flight.

    Roughly: ``moves.send(layer, stage=new)`` for each that leaves, then ``moves.recv(stage=old)`` for each that comes

    Pairs with itself on every other stage.
    """


class OpenSession(StreamInstruction):
    """Allocate a session's state on this stage: rolling caches, VAE caches, noise seed.

    Roughly: ``sessions[session] = SessionState(seed)``
    """


class CloseSession(StreamInstruction):
    """Free a session's state. No row of it is in flight.

    Roughly: ``del sessions[session]``
    """


class SendEmbedding(StreamInstruction):
    """Pass the controller's text embedding on, on a first stage that is not in the ring.

    Roughly: ``activations.send(controller.take_prompt(prompt), stage=next)``

    Pairs with :class:`EmbedPrompt` on the next stage.
    """


class EmbedPrompt(StreamInstruction):
    """Project a text embedding, and compute this stage's cross-attention keys/values once; first ring stage only.

    Roughly: ``prompts[prompt] = cross_attention(embed.text(embedding))``

    The embedding is the controller's, or pairs with :class:`SendEmbedding` on the stage before.
    """


class RecvPrompt(StreamInstruction):
    """Receive a projected text embedding, and compute this stage's cross-attention keys/values once.

    Roughly: ``prompts[prompt] = cross_attention(activations.recv(stage=prev))``

    Pairs with :class:`SendPrompt` on the previous stage.
    """


class SendPrompt(StreamInstruction):
    """Pass a projected text embedding on.

    Roughly: ``activations.send(context, stage=next)``

    Pairs with :class:`RecvPrompt` on the next stage.
    """


class DropPrompt(StreamInstruction):
    """Free a prompt's cross-attention keys/values. No row uses it from here on.

    Roughly: ``del prompts[prompt]``
    """


class RecvLatents(StreamInstruction):
    """Receive the latents of the rows that go on, from the last ring stage.

    Roughly: ``latents[:num_rows] = returned.recv(stage=ring_last)``

    Pairs with :class:`ReturnLatents` of launch ``launch - ring stages`` on the last ring stage.
    """


class EncodeChunk(StreamInstruction):
    """Encode the pixels of a chunk that enters the ring; first stage only.

    Roughly: ``video[session, chunk] = encode(controller.take_chunk(session, chunk))``
    """


class SendVideo(StreamInstruction):
    """Pass encoded latents on, on a first stage that is not in the ring.

    Roughly: ``activations.send(video[session, chunk], stage=next)``

    Pairs with :class:`RecvVideo` on the next stage, one tick later.
    """


class RecvVideo(StreamInstruction):
    """Receive encoded latents on a first ring stage that does not encode.

    Roughly: ``video[session, chunk] = activations.recv(stage=prev)``

    Pairs with :class:`SendVideo` on the previous stage, one tick earlier.
    """


class StartChunk(StreamInstruction):
    """Make the noisy latents of a chunk that enters the ring, and append them as the batch's next row.

    Roughly: ``latents.append(start(video[session, chunk], noise(session, chunk, 0)))``; for a model that takes the
    source's latents, they are kept for the chunk's passes.
    """


class ForwardPass(StreamInstruction):
    """Run this stage's ring layers on the rows of a launch. Reads and writes the rolling caches.

    Roughly: ``hidden = module(hidden, rows)``
    """


class SendActivations(StreamInstruction):
    """Send hidden states, noisy latents and time modulation of the rows to the next stage, as one message.

    Roughly: ``activations.send(hidden, latents, modulation, stage=next)``; never waits for the receive.

    Pairs with :class:`RecvActivations` on the next stage, one tick later.
    """


class RecvActivations(StreamInstruction):
    """Receive the rows of a launch from the previous stage.

    Roughly: ``hidden, latents, modulation = activations.recv(stage=prev)``

    Pairs with :class:`SendActivations` on the previous stage, one tick earlier.
    """


class StepLatents(StreamInstruction):
    """Take the rows one denoising step on: from the predicted flow to the next noisy latents, or the clean ones.

    Roughly: ``latents = noise_schedule.step(latents, flow, step, noise(session, chunk, step + 1))``
    """


class ReturnLatents(StreamInstruction):
    """Send the stepped latents of the rows that go on, from the last ring stage to the first.

    Roughly: ``returned.send(latents[not finished], stage=ring_first)``; never waits for the receive.

    Pairs with :class:`RecvLatents` on the first ring stage, one tick later.
    """


class TakeFinished(StreamInstruction):
    """Take the clean latents of a finished chunk out of the batch; last ring stage only.

    Roughly: ``finished = latents[row]``
    """


class RecvFinished(StreamInstruction):
    """Receive a finished chunk from the previous stage: clean latents, or features between two layers of the decoder.

    Roughly: ``finished = activations.recv(stage=prev)``

    Pairs with :class:`SendFinished` on the previous stage, one tick earlier.
    """


class DecodeChunk(StreamInstruction):
    """Run this stage's layers of the decoder on a finished chunk.

    Roughly: ``finished = decode(finished)``
    """


class SendFinished(StreamInstruction):
    """Pass a finished chunk on, as far as it is decoded.

    Roughly: ``activations.send(finished, stage=next)``

    Pairs with :class:`RecvFinished` on the next stage, one tick later.
    """


class DeliverChunk(StreamInstruction):
    """Hand the pixels of a finished chunk to the controller; last stage only.

    Roughly: ``frames.send(finished, rank=0)``

    Pairs with the controller's collector.
    """
