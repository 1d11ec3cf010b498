"""Small Caffe nets, written for these tests, one idea each."""

LENET = """
name: "lenet"   # three nets in one text, told apart by stages
layer { name: "train-data" type: "Data" top: "data" top: "label" include { stage: "train" }
        data_param { batch_size: 64 } }
layer { name: "val-data" type: "Data" top: "data" top: "label" include { stage: "val" } }
layer { name: "scale" type: "Power" bottom: "data" top: "scaled" power_param { scale: 0.5 } }
layer { name: "conv1" type: "Convolution" bottom: "scaled" top: "conv1"
        param { lr_mult: 1 } param { lr_mult: 2 }
        convolution_param { num_output: 20 kernel_size: 5 stride: 1
          weight_filler { type: "xavier" } bias_filler { type: "constant" value: 0.25 } } }
layer { name: "pool1" type: "Pooling" bottom: "conv1" top: "pool1"
        pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
        convolution_param { num_output: 50 kernel_size: 5 } }
layer { name: "pool2" type: "Pooling" bottom: "conv2" top: "pool2"
        pooling_param { pool: MAX kernel_size: 2 stride: 2 } }
layer { name: "ip1" type: "InnerProduct" bottom: "pool2" top: "ip1"
        inner_product_param { num_output: 500 } }
layer { name: "relu1" type: "ReLU" bottom: "ip1" top: "ip1" }
layer { name: "ip2" type: "InnerProduct" bottom: "ip1" top: "ip2" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip2" bottom: "label" top: "accuracy"
        include { stage: "val" } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip2" bottom: "label" top: "loss"
        exclude { stage: "deploy" } }
layer { name: "softmax" type: "Softmax" bottom: "ip2" top: "softmax" include { stage: "deploy" } }
"""

# Grouped convolutions, normalization across channels, dropout in place, a pool that rounds up.
ALEXNET = """
input: "data" input_dim: 1 input_dim: 3 input_dim: 35 input_dim: 35
layer { name: "conv1" type: "Convolution" bottom: "data" top: "conv1"
        convolution_param { num_output: 8 kernel_h: 5 kernel_w: 5 stride_h: 2 stride_w: 2 } }
layer { name: "relu1" type: "ReLU" bottom: "conv1" top: "conv1" }
layer { name: "norm1" type: "LRN" bottom: "conv1" top: "norm1"
        lrn_param { local_size: 5 alpha: 0.5 beta: 0.75 } }
layer { name: "pool1" type: "Pooling" bottom: "norm1" top: "pool1"
        pooling_param { pool: MAX kernel_size: 3 stride: 2 } }
layer { name: "conv2" type: "Convolution" bottom: "pool1" top: "conv2"
        convolution_param { num_output: 12 pad: 1 kernel_size: 3 group: 2 } }
layer { name: "relu2" type: "ReLU" bottom: "conv2" top: "conv2" }
layer { name: "pool2" type: "Pooling" bottom: "conv2" top: "pool2"
        pooling_param { pool: AVE kernel_size: 3 stride: 2 } }
layer { name: "fc6" type: "InnerProduct" bottom: "pool2" top: "fc6"
        inner_product_param { num_output: 16 } }
layer { name: "relu6" type: "ReLU" bottom: "fc6" top: "fc6" }
layer { name: "drop6" type: "Dropout" bottom: "fc6" top: "fc6"
        dropout_param { dropout_ratio: 0.5 } }
layer { name: "fc7" type: "InnerProduct" bottom: "fc6" top: "fc7"
        inner_product_param { num_output: 1000 } }
layer { name: "prob" type: "Softmax" bottom: "fc7" top: "prob" }
"""

# One inception block, with an auxiliary loss beside it, names with slashes as GoogLeNet's.
INCEPTION = """
layer { name: "data" type: "Input" top: "data"
        input_param { shape: { dim: 1 dim: 4 dim: 9 dim: 9 } } }
layer { name: "inception/1x1" type: "Convolution" bottom: "data" top: "inception/1x1"
        convolution_param { num_output: 3 kernel_size: 1 } }
layer { name: "inception/3x3_reduce" type: "Convolution" bottom: "data" top: "inception/3x3_reduce"
        convolution_param { num_output: 2 kernel_size: 1 } }
layer { name: "inception/3x3" type: "Convolution" bottom: "inception/3x3_reduce"
        top: "inception/3x3" convolution_param { num_output: 5 kernel_size: 3 pad: 1 } }
layer { name: "inception/pool" type: "Pooling" bottom: "data" top: "inception/pool"
        pooling_param { pool: MAX kernel_size: 3 stride: 1 pad: 1 } }
layer { name: "inception/output" type: "Concat" bottom: "inception/1x1" bottom: "inception/3x3"
        bottom: "inception/pool" top: "inception/output" }
layer { name: "loss1/classifier" type: "InnerProduct" bottom: "inception/1x1"
        top: "loss1/classifier" inner_product_param { num_output: 99 } }
layer { name: "loss1" type: "SoftmaxWithLoss" bottom: "loss1/classifier" bottom: "label"
        top: "loss1" loss_weight: 0.3 }
layer { name: "pool" type: "Pooling" bottom: "inception/output" top: "pool"
        pooling_param { pool: AVE global_pooling: true } }
layer { name: "loss3/classifier" type: "InnerProduct" bottom: "pool" top: "loss3/classifier"
        inner_product_param { num_output: 99 } }
layer { name: "loss3" type: "SoftmaxWithLoss" bottom: "loss3/classifier" bottom: "label"
        top: "loss3" }
"""

# A residual block: batch norm and scale in place, a projection, a sum that is rectified in place.
RESIDUAL = """
input: "data"
input_shape { dim: 1 dim: 4 dim: 8 dim: 8 }
layer { name: "res_branch1" type: "Convolution" bottom: "data" top: "res_branch1"
        convolution_param { num_output: 6 kernel_size: 1 stride: 2 bias_term: false } }
layer { name: "bn_branch1" type: "BatchNorm" bottom: "res_branch1" top: "res_branch1"
        param { lr_mult: 0 } batch_norm_param { use_global_stats: true } }
layer { name: "scale_branch1" type: "Scale" bottom: "res_branch1" top: "res_branch1"
        scale_param { bias_term: true } }
layer { name: "res_branch2" type: "Convolution" bottom: "data" top: "res_branch2"
        convolution_param { num_output: 6 kernel_size: 3 pad: 1 stride: 2 bias_term: false } }
layer { name: "bn_branch2" type: "BatchNorm" bottom: "res_branch2" top: "res_branch2" }
layer { name: "scale_branch2" type: "Scale" bottom: "res_branch2" top: "res_branch2"
        scale_param { bias_term: true } }
layer { name: "res" type: "Eltwise" bottom: "res_branch1" bottom: "res_branch2" top: "res"
        eltwise_param { operation: SUM coeff: 1 coeff: -0.5 } }
layer { name: "res_relu" type: "ReLU" bottom: "res" top: "res" }
layer { name: "pool5" type: "Pooling" bottom: "res" top: "pool5"
        pooling_param { pool: AVE kernel_size: 4 stride: 1 } }
layer { name: "fc" type: "InnerProduct" bottom: "pool5" top: "fc"
        inner_product_param { num_output: 5 } }
"""
