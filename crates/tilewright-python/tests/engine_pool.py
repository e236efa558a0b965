"""A stand-in of SGLang's token pools: keys and values by slot, with a pool of its own for window layers if the case is hybrid."""

import torch


class Pool:
    """Buffers ``[num_slots, num_kv_heads, head_dim]`` per layer. Page 0 takes the writes of padding."""

    def __init__(self, driver):
        case, device = driver.case, driver.device
        size = driver.num_blocks * case.page_size
        shape = (size, case.heads[1], case.dim)
        self.dtype = case.cache_dtype
        self._buffers = [tuple(torch.zeros(shape, device=device).to(self.dtype) for _ in range(2)) for _ in case.windows]
        self._is_hybrid = case.hybrid_pool
        self.translator = _Translator(self)
        if case.hybrid_pool:
            self.layers_mapping = {index: (index, window is not None) for index, window in enumerate(case.windows)}
            pages = torch.cat([torch.zeros(1, dtype=torch.long), torch.randperm(driver.num_blocks - 1, generator=driver.generator) + 1])
            slots = pages[:, None] * case.page_size + torch.arange(case.page_size)
            self._full_to_window = slots.reshape(-1).to(device)
            self.translate_loc_from_full_to_swa = lambda slots: self._full_to_window[slots.long()]

    def get_kv_buffer(self, layer_id):
        """Keys and values of a layer."""
        return self._buffers[layer_id]

    def set_kv_buffer(self, layer, location, k, v, k_scale=None, v_scale=None):
        """Writes new tokens; like SGLang's pool it divides by scales if the cache has another dtype."""
        in_window_pool = self._is_hybrid and self.layers_mapping[layer.layer_id][1]
        slots = location.swa_loc if in_window_pool else location.loc
        for buffer, x, scale in zip(self._buffers[layer.layer_id], (k, v), (k_scale, v_scale)):
            if x.dtype != self.dtype and scale is not None:
                x.div_(scale)
            # fp8 has no index_put
            bits = torch.uint8 if self.dtype.itemsize == 1 else torch.int16
            buffer.view(bits)[slots.long()] = x.to(self.dtype).view(bits)


class _Translator:
    """Ids of the pool, which need no translation but that to the window pool."""

    is_translating = False

    def __init__(self, pool):
        self._pool = pool

    def write_ids(self, forward_batch, kind):
        """The slots that window layers write to."""
        return self._pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)
