// How the weights of a linear layer are stored, and how a warp takes them: as 16 bytes a lane of each of 16 outputs at
// a time, of which products take 8 inputs of an output at a time, as words of the format of x.
#pragma once

#include "../../common/formats.h"

namespace specdec::cuda {

// In the format of x, one output after the other.
template <class Format>
struct FloatWeights {
  static constexpr int kParts = 1;  // of 8 inputs each that a lane has of an output
  static constexpr int kStep = 64;  // bytes from a chunk of inputs to the next one of the same outputs
  static constexpr bool kHasScales = false;

  SPECDEC_DEVICE static const char* place(const char* weight, int64_t output, int inputs, int64_t chunk, int quarter) {
    return weight + output * inputs * 2 + chunk * kStep + quarter * 16;
  }
  SPECDEC_DEVICE static simt::Bytes16 part(const simt::Bytes16& bytes, int) { return bytes; }
  SPECDEC_DEVICE static float scale(const char*, int64_t, int) { return 1.0f; }
};

// As integers of 8 bits with a scale an output. Of each 8 outputs their integers, of 64 inputs at a time, and then
// their scales (specdec_layers/int8_rows.py), so a warp loads 512 neighbouring bytes.
template <class Format>
struct Int8Weights {
  static constexpr int kParts = 2;
  static constexpr int kStep = 512;
  static constexpr bool kHasScales = true;
  static constexpr int kOutputs = 8, kInputs = 64;  // of such 512 bytes

  SPECDEC_DEVICE static const char* place(const char* weight, int64_t output, int inputs, int64_t chunk, int quarter) {
    return tile(weight, output, inputs) + chunk * kStep + output % kOutputs * kInputs + quarter * 16;
  }
  SPECDEC_DEVICE static simt::Bytes16 part(const simt::Bytes16& bytes, int part) {
    simt::Bytes16 numbers;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t shifted = bytes.word[2 * part + i] ^ 0x80808080u;  // by 128, so none is below 0
      numbers.word[2 * i] = Format::centred(simt::spread<0>(shifted));
      numbers.word[2 * i + 1] = Format::centred(simt::spread<2>(shifted));
    }
    return numbers;
  }
  SPECDEC_DEVICE static float scale(const char* weight, int64_t output, int inputs) {
    const char* scales = tile(weight, output, inputs) + int64_t{kOutputs} * inputs;
    return reinterpret_cast<const float*>(scales)[output % kOutputs] * Format::kOfCentred;
  }

 private:
  SPECDEC_DEVICE static const char* tile(const char* weight, int64_t output, int inputs) {
    return weight + output / kOutputs * kOutputs * (int64_t{inputs} + static_cast<int>(sizeof(float)));
  }
};

}  // namespace specdec::cuda
