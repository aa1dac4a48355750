#include <cstdio>
__global__ void twice(float *x) { x[threadIdx.x] *= 2; }
int main() {
    float host[4] = {1, 2, 3, 4}, *device;
    cudaMalloc(&device, sizeof host);
    cudaMemcpy(device, host, sizeof host, cudaMemcpyHostToDevice);
    twice<<<1, 4>>>(device);
    cudaMemcpy(host, device, sizeof host, cudaMemcpyDeviceToHost);
    if (cudaGetLastError() != cudaSuccess || host[3] != 8) { fprintf(stderr, "wrong result\n"); return 1; }
    return 0;
}
