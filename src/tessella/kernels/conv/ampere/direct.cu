constexpr int THREADS = 32 * WARPS;
constexpr int NI = FILTERS / 8;
constexpr int GROUPS = TAPS_H * WORDS / 4;  // of four words, one for each lane of a quad
constexpr bool POOLED = POOL_H > 0;
constexpr int MADE = POOLED ? 2 * ROWS + 1 : ROWS;  // rows of the convolution
constexpr int ROWS_IN = (MADE - 1) * STRIDE_H + TAPS_H;
constexpr int CHUNKS = WIDTH * CHANNELS / 8;  // of a row of the image, 16 bytes each
constexpr int TILES_W = (OUT_W + 15) / 16;  // of 16 pixels
constexpr int WEIGHT_BYTES = FILTERS * WEIGHT_PITCH;
constexpr int BIAS_AT = WEIGHT_BYTES, X_AT = BIAS_AT + 4 * FILTERS;
constexpr int KEPT = 2 * LINES + 1;  // rows of the convolution that windows read at a time
constexpr int Y_AT = X_AT + 4 * ROWS_IN * PITCH;  // where they are
constexpr int Y_CHUNKS = FILTERS / 8;  // of a pixel there
constexpr u32 LEAST = KIND == 1 ? 0xfc00fc00u : 0xff80ff80u;  // two minus infinities

// which of the two halves of a word of a run hold values of it
__device__ __forceinline__ constexpr u32 held(int word) {
  return (2 * word >= SHIFT && 2 * word < SHIFT + RUN ? 0xffffu : 0u)
       | (2 * word + 1 >= SHIFT && 2 * word + 1 < SHIFT + RUN ? 0xffff0000u : 0u);
}
__device__ __forceinline__ constexpr bool whole(int word) {
  return (held(word) & held(word + 1) & held(word + 2) & held(word + 3)) == ~0u;
}
template <int KIND> __device__ __forceinline__ float number(const void* from, int place) {
  if constexpr (KIND == 0) return ((const float*)from)[place];
  else if constexpr (KIND == 1) return of_half(((const u16*)from)[place]);
  else if constexpr (KIND == 2) return __uint_as_float((u32)((const u16*)from)[place] << 16);
  else return 0.0f;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) conv_direct(
    const void* x, const void* weight, const void* bias, void* out, float gamma, int bands,
    int across, int filters) {
  extern __shared__ __align__(128) char memory[];
  const u32 shared = address(memory);
  const int thread = threadIdx.x, lane = thread % 32, warp = thread / 32;
  const int part = blockIdx.x % across, band = blockIdx.x / across % bands;
  const int image = blockIdx.x / across / bands;
  const int first_row = POOLED ? 2 * band * ROWS - POOL_PADDING_H : band * ROWS;
  const int top = first_row * STRIDE_H - PADDING_H;
  // two pixels' writes at a time, and reads of one, ask no bank for two chunks
  auto chunk_at = [&](int row, int column, int chunk) {
    return shared + Y_AT + 16 * ((row % KEPT * OUT_W + column) * Y_CHUNKS + (chunk ^ column % 2 * 4));
  };

  for (int i = thread; i < WEIGHT_BYTES / 16; i += THREADS)
    copy_16(shared + 16 * i, (const char*)weight + part * WEIGHT_BYTES + 16 * i, true);
  for (int i = thread; i < ROWS_IN * CHUNKS; i += THREADS) {
    const int row = i / CHUNKS, chunk = i % CHUNKS, h = top + row;
    const bool there = (u32)h < HEIGHT;
    const u16* from = (const u16*)x
        + (there ? ((long long)image * HEIGHT + h) * WIDTH * CHANNELS + 8 * chunk : 0);
    copy_16(shared + X_AT + 4 * (row * PITCH + LEAD + 4 * chunk), from, there);
  }
  end_copies();
  constexpr int BESIDE = PITCH - 4 * CHUNKS;  // words beside the image
  for (int i = thread; i < ROWS_IN * BESIDE; i += THREADS) {
    const int row = i / BESIDE, word = i % BESIDE;
    write_word(shared + X_AT + 4 * (row * PITCH + (word < LEAD ? word : word + 4 * CHUNKS)), 0);
  }
  for (int i = thread; i < FILTERS; i += THREADS) {
    float shift = 0.0f;
    if constexpr (BIAS >= 0) shift = number<BIAS>(bias, part * FILTERS + i);
    write_word(shared + BIAS_AT + 4 * i, __float_as_uint(shift));
  }
  wait_for_copies<0>();
  __syncthreads();

  const int g = lane / 4, quad = lane % 4;
  u32 mask[WORDS / 4];  // what lies beside a run may be infinite
  #pragma unroll
  for (int c = 0; c < WORDS / 4; ++c)
    mask[c] = quad == 0 ? held(4 * c) : quad == 1 ? held(4 * c + 1)
            : quad == 2 ? held(4 * c + 2) : held(4 * c + 3);
  const u32 w_at = shared + (lane % 8 + lane / 16 * 8) * WEIGHT_PITCH + lane / 8 % 2 * 16;

  auto make = [&](int begin, int end) {  // these tiles
    #pragma unroll 1
    for (int first = begin + warp * MI; first < end; first += WARPS * MI) {
      u32 at[MI];  // of this thread's word of the first pixel's first run
      #pragma unroll
      for (int i = 0; i < MI; ++i) {
        const int tile = first + i < end ? first + i : end - 1;
        const int row = tile / TILES_W, column = tile % TILES_W * 16 + g;
        at[i] = shared + X_AT
              + 4 * (row * STRIDE_H * PITCH + LEAD + FIRST + column * STEP + quad);
      }
      float sums[MI][NI][4];
      #pragma unroll
      for (int i = 0; i < MI; ++i)
        #pragma unroll
        for (int j = 0; j < NI; ++j)
          #pragma unroll
          for (int l = 0; l < 4; ++l) sums[i][j][l] = 0.0f;
      #pragma unroll
      for (int product = 0; product < (GROUPS + 1) / 2; ++product) {
        u32 a[MI][4], b[NI][2];
        #pragma unroll
        for (int j = 0; j < NI; j += 2)
          read_blocks(b[j][0], b[j][1], b[j + 1][0], b[j + 1][1],
                      w_at + j * 8 * WEIGHT_PITCH + product * 32);
        #pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int group = 2 * product + half, run = group / (WORDS / 4);
          const int word = group % (WORDS / 4) * 4;
          #pragma unroll
          for (int i = 0; i < MI; ++i)
            #pragma unroll
            for (int pixel = 0; pixel < 2; ++pixel) {
              u32 read = 0;
              if (group < GROUPS) {
                read = read_word(at[i] + 4 * (run * PITCH + word + 8 * pixel * STEP));
                if (!whole(word)) read &= mask[word / 4];
              }
              a[i][2 * half + pixel] = read;
            }
        }
        #pragma unroll
        for (int i = 0; i < MI; ++i)
          #pragma unroll
          for (int j = 0; j < NI; ++j) multiply(sums[i][j], a[i], b[j]);
      }

      // the weight is packed so that a quad's lanes have eight neighbouring channels each
      #pragma unroll
      for (int part_of = 0; part_of < NI / 4; ++part_of) {
        float shift[8];
        #pragma unroll
        for (int l = 0; l < 8; l += 4) {
          const uint4 four = read_four(shared + BIAS_AT + 4 * (32 * part_of + 8 * quad + l));
          shift[l] = __uint_as_float(four.x);
          shift[l + 1] = __uint_as_float(four.y);
          shift[l + 2] = __uint_as_float(four.z);
          shift[l + 3] = __uint_as_float(four.w);
        }
        #pragma unroll
        for (int i = 0; i < MI; ++i)
          #pragma unroll
          for (int pixel = 0; pixel < 2; ++pixel) {
            u32 words[4];
            #pragma unroll
            for (int j = 0; j < 4; ++j) {
              float y[2];
              #pragma unroll
              for (int l = 0; l < 2; ++l) {
                y[l] = activate(sums[i][4 * part_of + j][2 * pixel + l] + shift[2 * j + l]);
                if constexpr (RESCALED) y[l] = y[l] * gamma;
              }
              words[j] = KIND == 1 ? to_half(y[0]) | to_half(y[1]) << 16
                                   : to_bfloat(y[0]) | to_bfloat(y[1]) << 16;
            }
            const int tile = first + i, column = tile % TILES_W * 16 + g + 8 * pixel;
            const int row = first_row + tile / TILES_W;
            if constexpr (POOLED) {
              if (tile < end && column < OUT_W)
                write_four(chunk_at(tile / TILES_W, column, 4 * part_of + quad), words[0], words[1],
                           words[2], words[3]);
            } else if (tile < end && column < OUT_W && row < OUT_H) {
              const long long place = ((long long)image * OUT_H + row) * OUT_W + column;
              *(uint4*)((u16*)out + place * filters + part * FILTERS + 32 * part_of + 8 * quad) =
                  make_uint4(words[0], words[1], words[2], words[3]);
            }
          }
      }
    }
  };

  if constexpr (!POOLED) return make(0, ROWS * TILES_W);
  #pragma unroll 1
  for (int line = 0; line < ROWS; line += LINES) {
    const int next = line + LINES < ROWS ? line + LINES : ROWS;
    make(line == 0 ? 0 : (2 * line + 1) * TILES_W, (2 * next + 1) * TILES_W);
    __syncthreads();
    for (int i = thread; i < (next - line) * POOL_W * Y_CHUNKS; i += THREADS) {
      const int chunk = i % Y_CHUNKS, column = i / Y_CHUNKS % POOL_W;
      const int window = line + i / Y_CHUNKS / POOL_W, row = band * ROWS + window;
      if (row >= POOL_H) break;
      u32 most[4] = {LEAST, LEAST, LEAST, LEAST};
      #pragma unroll
      for (int r = 0; r < 3; ++r)
        #pragma unroll
        for (int c = 0; c < 3; ++c) {
          const int read = 2 * column - POOL_PADDING_W + c;
          if ((u32)(first_row + 2 * window + r) >= OUT_H || (u32)read >= OUT_W) continue;
          const uint4 four = read_four(chunk_at(2 * window + r, read, chunk));
          const u32 words[4] = {four.x, four.y, four.z, four.w};
          #pragma unroll
          for (int l = 0; l < 4; ++l)
            most[l] = KIND == 1 ? larger_halves(most[l], words[l])
                                : larger_bfloats(most[l], words[l]);
        }
      const long long place = ((long long)image * POOL_H + row) * POOL_W + column;
      *(uint4*)((u16*)out + place * filters + part * FILTERS + 8 * chunk) =
          make_uint4(most[0], most[1], most[2], most[3]);
    }
    __syncthreads();
  }
}
